// Accuracy against parallelism and against speed, one curve for each system, by Chart.js.
const frontier = (() => {
  // Systems have the colours, markers and lines of the figures for print, by matplotlib's names of markers.
  const TURNS = { "^": 0, ">": 90, v: 180, "<": 270 };
  const SHAPES = { o: "circle", s: "rect", D: "rectRot", X: "crossRot", P: "cross", "*": "star", ...Object.fromEntries(Object.keys(TURNS).map((name) => [name, "triangle"])) };
  const CORNERS = { p: [5, 1], h: [6, 1], H: [6, 1], 8: [8, 1], d: [4, 0.6] }; // and width by height
  const PLANES = [["tpf", "Tokens per forward"], ["tps", "Tokens per second, batch 1"]];
  const LEAST_RANGE = 5; // points of accuracy, so that differences of single items look small

  // Runs that differ in settings only are one system here.
  const backbones = new Set(store.index.runs.map((run) => run.backbone));
  const system = (cell) => (backbones.size > 1 ? `${cell.system} · ${cell.about.backbone}` : cell.system);
  const systems = [...new Map(store.cells.map((cell) => [system(cell), cell.about]))].reduce((all, [name, { colour, marker, dashes }]) => {
    // Systems of one decoder that have no style of their own get the markers that are left.
    const taken = (shape) => all.some(([, other]) => other.colour === colour && other.marker === shape);
    const own = taken(marker) ? Object.keys(SHAPES).find((shape) => !taken(shape)) ?? marker : marker;
    return [...all, [name, { colour, dashes, marker: own }]];
  }, []);
  const BLACK = "#000000"; // the ink of the page, which is light on a dark one

  function section(visible) {
    const tasks = [...new Set(store.cells.filter((cell) => PLANES.some(([metric]) => point(cell, metric))).map(format.task))];
    if (!tasks.length) return { node: null, draw() {}, close() {} };
    const asked = router.query().get("plot");
    let task = tasks.includes(asked) ? asked : tasks.find((name) => name.startsWith(matrix.MEAN)) || tasks[0];
    const choice = filters.select("Task", tasks.map((name) => [name, name]), task, (value) => {
      task = value;
      router.note({ plot: value });
      both.draw();
    });
    const both = planes(() => visible().filter((cell) => format.task(cell) === task));
    const node = dom.el("section", { "aria-labelledby": "frontier" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "frontier" }, "Frontier"), dom.el("div.controls", {}, choice)), both.node);
    return { ...both, node };
  }

  // Both plots of some cells, which are asked for at each drawing; `open` is called with the cell of a point that is pressed.
  function planes(cells, open = null) {
    const shown = PLANES.map(([metric, label]) => ({ metric, label, open,
      canvas: dom.el("canvas", { role: "img", "aria-label": `Accuracy against ${label.toLowerCase()}; the tables have the numbers` }),
      note: dom.el("p.caption") }));
    let charts = [];
    const clear = () => {
      for (const chart of charts) chart.destroy();
      charts = [];
    };
    const draw = () => {
      clear();
      charts = shown.map((plane) => {
        const points = cells().map((cell) => point(cell, plane.metric)).filter(Boolean);
        const [first, ...others] = format.isSpeed(plane.metric) ? [...new Set(points.map(({ cell }) => format.machine(cell)))] : [];
        dom.replace(plane.note, points.length === 0 && "Nothing here was measured in both.",
          others.length > 0 && `Only speeds of ${first} are shown; ${others.join(" and ")} cannot be compared with it.`);
        return chart(plane, others.length ? points.filter(({ cell }) => format.machine(cell) === first) : points);
      });
    };
    theme.changed.addEventListener("change", draw);
    const node = [
      dom.el("div.planes", {}, shown.map(({ label, canvas, note }) => dom.el("figure", {},
        dom.el("figcaption", {}, `Accuracy against ${label.toLowerCase()}`), dom.el("div.canvas", {}, canvas), note))),
      dom.el("p.caption", {}, "Bars are 95% intervals. A line joins the settings of one system that no other of its settings beats in both directions; ",
        "the dashed line does so for all systems.")];
    return { node, draw, close: () => {
      theme.changed.removeEventListener("change", draw);
      clear();
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
      ctx.lineWidth = 1.5;
      for (const [place, set] of chart.data.datasets.entries()) {
        if (set.showLine || !chart.isDatasetVisible(place)) continue;
        ctx.strokeStyle = set.borderColor;
        ctx.globalAlpha = set.data.length > 4 ? 0.4 : 0.9;
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

  // What Chart.js draws for a marker: one of its own shapes, or a polygon on a canvas.
  function drawn(marker, colour) {
    if (!(marker in CORNERS)) return { pointStyle: SHAPES[marker] ?? "circle", pointRotation: TURNS[marker] ?? 0 };
    const [[corners, width], radius] = [CORNERS[marker], 7];
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * radius + 2, height: 2 * radius + 2 });
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = colour;
    for (let corner = 0; corner < corners; corner += 1) {
      const angle = (2 * Math.PI * corner) / corners - Math.PI / 2;
      ctx.lineTo(radius + 1 + width * radius * Math.cos(angle), radius + 1 + radius * Math.sin(angle));
    }
    ctx.fill();
    return { pointStyle: canvas };
  }

  function datasets(points) {
    const curve = (data, more) => ({ label: "", data, showLine: true, pointRadius: 0, pointHitRadius: 0, borderWidth: 1.5, ...more });
    const sets = systems.flatMap(([name, { colour: given, marker, dashes }]) => {
      const data = points.filter(({ cell }) => system(cell) === name);
      const colour = theme.colour(given === BLACK ? "var(--ink)" : `light-dark(${given}, color-mix(in srgb, ${given}, white 30%))`);
      const dots = { label: name, data, ...drawn(marker, colour), borderColor: colour, backgroundColor: colour, hoverBorderColor: colour, hoverBackgroundColor: colour,
        pointRadius: data.length > 4 ? 4 : 7, pointHoverRadius: 9, borderWidth: 2, clip: 12 };
      return data.length > 1 ? [dots, curve(best(data), { borderColor: colour, borderDash: dashes })] : data.length ? [dots] : [];
    });
    const all = best(points);
    return all.length > 1 ? [...sets, curve(all, { borderColor: theme.colour("var(--muted)"), borderDash: [5, 5] })] : sets;
  }

  // The range of accuracies with their intervals, at least `LEAST_RANGE` wide, within 0 to 100.
  function range(points) {
    const bounds = points.flatMap(({ y, ys }) => [y, ys.low ?? y, ys.high ?? y]);
    const [low, high] = [Math.min(...bounds), Math.max(...bounds)];
    const room = Math.max((high - low) * 0.08, (LEAST_RANGE - (high - low)) / 2, 0.5);
    return { min: Math.max(0, low - room), max: high + room > 100 ? 100.5 : high + room };
  }

  function chart({ canvas, label, metric, open }, points) {
    const [text, grid] = [theme.colour("var(--muted)"), theme.colour("var(--line)")];
    const axis = (title, more) => ({ title: { display: true, text: title, color: text }, grid: { color: grid }, border: { color: grid }, ...more,
      ticks: { color: text, includeBounds: false } });
    return new Chart(canvas, {
      type: "scatter",
      data: { datasets: datasets(points) },
      plugins: [whiskers],
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, layout: { padding: { right: 12 } },
        onClick: (_, items, { data }) => open && items.length > 0 && open(data.datasets[items[0].datasetIndex].data[items[0].index].cell),
        onHover: (event, items) => { canvas.style.cursor = open && items.length ? "pointer" : ""; },
        scales: { x: axis(label, { min: 0, max: 1.08 * Math.max(...points.map(({ x, xs }) => xs.high ?? x)) }), y: axis("Accuracy, %", points.length ? range(points) : {}) },
        plugins: {
          legend: { position: "bottom", labels: { color: theme.colour("var(--ink)"), usePointStyle: true, boxHeight: 8, filter: (item) => item.text !== "" } },
          tooltip: { filter: (item) => !item.dataset.showLine, callbacks: { label: (item) => hover(item, metric) } },
        },
      },
    });
  }

  function hover({ raw: { cell, xs, ys, x, y }, chart: { options } }, metric) {
    const range = ({ low, high }) => (low === null ? "" : ` [${format.number(low)}, ${format.number(high)}]`);
    return [
      `${store.title(cell)} · ${format.task(cell)}`,
      `accuracy ${format.number(y, 1)}${range(ys)}, n ${ys.n}`,
      `${options.scales.x.title.text.toLowerCase()} ${format.number(x)}${range(xs)}`,
      ...format.marks(cell, format.isSpeed(metric)).map(({ label }) => label),
    ];
  }

  return { section, planes };
})();
