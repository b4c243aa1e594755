// Figures as text.
const format = (() => {
  const LABELS = {
    accuracy: "Accuracy %", extracted: "Answer found %", strict: "Strict form %",
    tps: "TPS", tps_mean: "TPS, mean", tpf: "TPF", tpf_release: "TPF, release's",
    speedup: "Speed-up", mbu: "MBU %", latency_mean: "Latency mean, s", latency_p50: "Latency p50, s", latency_p95: "Latency p95, s",
    one_token_share: "Share of the one-token limit %", tokens_mean: "Tokens a sample", forwards_mean: "Forwards a sample",
  };
  const ACCURACY = "accuracy";
  const PASS = "pass@1";

  function number(value, digits) {
    if (value === null || value === undefined) return "–";
    if (digits === undefined) digits = Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 1 : 2;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits, useGrouping: false });
  }

  function seconds(value) {
    if (value === null) return "–";
    return value < 1 ? `${number(value * 1000, 0)} ms` : `${number(value, 2)} s`;
  }

  function count(value, one, many = `${one}s`) {
    return `${value.toLocaleString("en")} ${value === 1 ? one : many}`;
  }

  const metricLabel = (name) => LABELS[name] || name.replaceAll("_", " ");

  // A task's accuracy is called pass@1 where the answer is a program; they share a column.
  function figure(cell, metric) {
    return cell.metrics[metric] || (metric === ACCURACY ? cell.metrics[PASS] : undefined);
  }

  // A mini task always says so, whatever it is called.
  function task(cell) {
    return cell.mini && !cell.task.startsWith("mini_") ? `${cell.task} (mini)` : cell.task;
  }

  // What is shown of a system before anything else, as far as it was measured.
  const MAIN = [ACCURACY, "tps", "tpf", "speedup"];

  const columns = store.index.metrics.map((name) => (name === PASS ? ACCURACY : name))
    .filter((name, place, all) => all.indexOf(name) === place);

  return { number, seconds, count, metricLabel, figure, task, columns, ACCURACY, MAIN };
})();
