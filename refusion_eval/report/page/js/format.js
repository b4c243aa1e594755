// Figures as text.
const format = (() => {
  const ACCURACY = "accuracy";
  const PASS = "pass@1";

  // Whether less of a metric is better.
  const isCost = (metric) => store.index.costs.includes(metric);

  // Figures of these metrics compare on one machine only.
  const isSpeed = (metric) => store.index.speed.includes(metric);

  const machine = (cell) => (cell.hardware.length ? cell.hardware : cell.about.hardware).join(" | ");

  function number(value, digits) {
    if (value === null || value === undefined) return "–";
    if (digits === undefined) digits = Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 1 : 2;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, useGrouping: false });
  }

  function seconds(value) {
    if (value === null) return "–";
    if (value < 1) return `${number(value * 1000, 0)} ms`;
    if (value < 120) return `${number(value, 2)} s`;
    return value < 7200 ? `${number(value / 60, 1)} min` : `${number(value / 3600, 1)} h`;
  }

  // A time as it was recorded, to the minute.
  const date = (text) => (text ? `${text.slice(0, 16).replace("T", " ")} UTC` : "unknown");

  function count(value, one, many = `${one}s`) {
    return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
  }

  const metricLabel = (name) => store.index.labels[name] || name.replaceAll("_", " ");

  // A task's accuracy is called pass@1 where the answer is a program; they share a column.
  function figure(cell, metric) {
    return cell.metrics[metric] || (metric === ACCURACY ? cell.metrics[PASS] : undefined);
  }

  // A mini task always says so, whatever it is called.
  function task(cell) {
    return cell.mini && !cell.task.startsWith("mini_") ? `${cell.task} (mini)` : cell.task;
  }

  // The marks of a cell; those that concern speeds alone only beside a speed.
  const marks = (cell, besideSpeed) => cell.marks.filter((mark) => besideSpeed || !mark.of_speed);

  // What is shown of a system before anything else, as far as it was measured.
  const MAIN = [ACCURACY, "tps", "tpf", "speedup"];

  const columns = store.index.metrics.map((name) => (name === PASS ? ACCURACY : name))
    .filter((name, place, all) => all.indexOf(name) === place);

  return { number, seconds, date, count, metricLabel, figure, task, marks, machine, isCost, isSpeed, columns, ACCURACY, MAIN };
})();
