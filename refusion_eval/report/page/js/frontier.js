// Accuracy against parallelism and against speed, one point a system and task, by Chart.js.
const frontier = (() => {
  // Okabe and Ito's colours, and a shape each: told apart without colour too.
  const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"];
  const SHAPES = ["circle", "triangle", "rect", "rectRot", "star", "crossRot", "cross", "rectRounded"];
  const ALL = "";
  const PLANES = [["tpf", "Tokens per forward"], ["tps", "Tokens per second, batch 1"]];
  let task = null;

  const systems = [...new Set(store.cells.map(store.systemName))];
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function section(visible) {
    const tasks = [...new Set(store.cells.filter((cell) => PLANES.some(([metric]) => point(cell, metric))).map(format.task))];
    const canvases = PLANES.map(([, label]) => dom.el("canvas", { role: "img", "aria-label": `Accuracy against ${label.toLowerCase()}; the table above has the numbers` }));
    if (!tasks.length) {
      return { node: null, draw() {}, close() {} };
    }
    if (task === null || !(task === ALL || tasks.includes(task))) task = tasks.find((name) => name.startsWith("mean")) || tasks[0];
    let charts = [];
    const close = () => {
      for (const chart of charts) chart.destroy();
      charts = [];
    };
    const draw = () => {
      close();
      charts = PLANES.map(([metric, label], place) => chart(canvases[place], visible(), metric, label));
    };
    const choice = filters.select("Task", [...tasks.map((name) => [name, name]), [ALL, "every task"]], task, (value) => {
      task = value;
      draw();
    });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    const node = dom.el("section", { "aria-labelledby": "frontier" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "frontier" }, "Frontier"), dom.el("div.controls", {}, choice)),
      dom.el("div.planes", {}, PLANES.map(([, label], place) => dom.el("figure", {},
        dom.el("figcaption", {}, `Accuracy against ${label.toLowerCase()}`), dom.el("div.canvas", {}, canvases[place])))),
      dom.el("p.caption", {}, "Measured here; whiskers are 95% intervals. The dashed line joins the systems that no other beats in both."));
    return { node, draw, close: () => {
      dark.removeEventListener("change", draw);
      close();
    } };
  }

  function point(cell, metric) {
    const [x, y] = [cell.metrics[metric], format.figure(cell, format.ACCURACY)];
    return x && y && x.value !== null && y.value !== null ? { x: x.value, y: y.value, xs: x, ys: y, cell } : null;
  }

  // Points that no other is as good as in both directions, from left to right.
  function best(points) {
    return points.filter((one) => !points.some((other) => other !== one && other.x >= one.x && other.y >= one.y
      && (other.x > one.x || other.y > one.y))).sort((one, other) => one.x - other.x);
  }

  const whiskers = {
    id: "whiskers",
    beforeDatasetsDraw(chart) {
      const { ctx, scales: { x, y } } = chart;
      ctx.save();
      for (const [place, set] of chart.data.datasets.entries()) {
        if (set.showLine || !chart.isDatasetVisible(place)) continue;
        ctx.strokeStyle = set.borderColor;
        ctx.globalAlpha = 0.55;
        ctx.beginPath();
        for (const { x: px, y: py, xs, ys } of set.data) {
          if (xs.low !== null) line(ctx, x.getPixelForValue(xs.low), y.getPixelForValue(py), x.getPixelForValue(xs.high), y.getPixelForValue(py));
          if (ys.low !== null) line(ctx, x.getPixelForValue(px), y.getPixelForValue(ys.low), x.getPixelForValue(px), y.getPixelForValue(ys.high));
        }
        ctx.stroke();
      }
      ctx.restore();
    },
  };

  function line(ctx, x1, y1, x2, y2) {
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
  }

  function datasets(cells, metric) {
    const points = cells.filter((cell) => task === ALL ? !cell.mean : format.task(cell) === task)
      .map((cell) => point(cell, metric)).filter(Boolean);
    const bySystem = systems.map((name, number) => ({
      label: name,
      data: points.filter((one) => store.systemName(one.cell) === name),
      pointStyle: SHAPES[number % SHAPES.length],
      borderColor: COLOURS[number % COLOURS.length],
      backgroundColor: COLOURS[number % COLOURS.length],
      pointRadius: 7, pointHoverRadius: 9, borderWidth: 2, clip: 12,
    })).filter((set) => set.data.length);
    if (task === ALL || points.length < 2) return bySystem;
    return [...bySystem, { label: "frontier", data: best(points), showLine: true, pointRadius: 0, pointHitRadius: 0,
      borderColor: ink("--muted"), borderDash: [5, 5], borderWidth: 1.5 }];
  }

  function chart(canvas, cells, metric, label) {
    const [text, grid] = [ink("--muted"), ink("--line")];
    const axis = (title, more) => ({ title: { display: true, text: title, color: text }, ticks: { color: text },
      grid: { color: grid }, border: { color: grid }, ...more });
    return new Chart(canvas, {
      type: "scatter",
      data: { datasets: datasets(cells, metric) },
      plugins: [whiskers],
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, layout: { padding: { right: 12 } },
        scales: { x: axis(label, { beginAtZero: true, grace: "8%" }), y: axis("Accuracy %", { min: 0, max: 104,
          afterBuildTicks: (scale) => { scale.ticks = [0, 20, 40, 60, 80, 100].map((value) => ({ value })); } }) },
        plugins: {
          legend: { position: "bottom", labels: { color: ink("--ink"), usePointStyle: true, boxHeight: 8,
            filter: (item) => item.text !== "frontier" } },
          tooltip: { filter: (item) => !item.dataset.showLine, callbacks: { label: hover } },
        },
      },
    });
  }

  function hover({ raw: { cell, xs, ys, x, y }, chart: { options } }) {
    const range = ({ low, high }) => (low === null ? "" : ` [${format.number(low)}, ${format.number(high)}]`);
    return [
      `${store.systemName(cell)} · ${format.task(cell)}`,
      `accuracy ${format.number(y, 1)}${range(ys)}, n ${ys.n}`,
      `${options.scales.x.title.text.toLowerCase()} ${format.number(x)}${range(xs)}`,
      ...cell.marks.map(([word]) => word),
    ];
  }

  return { section };
})();
