// The first view: every system on every task with its figures, sorted and filtered; and the frontier plots.
const overview = (() => {
  // What the reader chose stays while the page is open.
  const chosen = { systems: null, tasks: null, metrics: null, sort: ["task", 1] };

  function prepare() {
    if (chosen.systems) return;
    chosen.systems = new Set(store.cells.map(store.systemName));
    chosen.tasks = new Set(store.cells.map(format.task));
    const main = format.MAIN.filter((name) => format.columns.includes(name));
    chosen.metrics = new Set(main.length ? main : format.columns);
  }

  function view(main) {
    prepare();
    router.trail(["Overview", null]);
    const table = dom.el("div.table-place");
    const plots = frontier.section(visible);
    const refresh = () => {
      dom.replace(table, rows());
      plots.draw();
    };
    const pairs = (values) => [...new Set(values)].map((value) => [value, value]);
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, "Runs"), dom.el("p.lead", {}, lead())),
      store.index.warnings.length > 0 && dom.el("ul.notes", { "aria-label": "What to know before comparing" },
        store.index.warnings.map((text) => dom.el("li", {}, text))),
      dom.el("section", { "aria-labelledby": "figures" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "figures" }, "Figures"),
          dom.el("div.controls", { role: "group", "aria-label": "Filters" },
            filters.choice("Systems", pairs(store.cells.map(store.systemName)), chosen.systems, refresh),
            filters.choice("Tasks", pairs(store.cells.map(format.task)), chosen.tasks, refresh),
            filters.choice("Metrics", format.columns.map((name) => [name, format.metricLabel(name)]), chosen.metrics, refresh))),
        table,
        dom.el("p.caption", {}, "In brackets: 95% interval by item. ",
          "TPS: tokens kept a second, one request at a time. TPF: tokens kept a forward.")),
      plots.node,
      runs());
    refresh();
    return plots.close;
  }

  function lead() {
    const samples = store.cells.reduce((sum, cell) => sum + (cell.mean ? 0 : cell.samples), 0);
    const tasks = new Set(store.cells.filter((cell) => !cell.mean).map((cell) => cell.task));
    return [format.count(store.index.runs.length, "run"), format.count(tasks.size, "task"), format.count(samples, "sample")].join(" · ");
  }

  const visible = () => store.cells.filter((cell) =>
    chosen.systems.has(store.systemName(cell)) && chosen.tasks.has(format.task(cell)));

  function sortValue(cell, key) {
    if (key === "system") return store.systemName(cell);
    if (key === "task") return format.task(cell);
    if (key === "n") return cell.items;
    const figure = format.figure(cell, key);
    return figure && figure.value !== null ? figure.value : null;
  }

  // By the chosen column; what has no figure comes last either way, means follow tasks, and ties go by task and system.
  function compare(one, other) {
    const [key, direction] = chosen.sort;
    if (key === "task" && one.mean !== other.mean) return one.mean ? 1 : -1;
    const [a, b] = [sortValue(one, key), sortValue(other, key)];
    if ((a === null) !== (b === null)) return a === null ? 1 : -1;
    const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    return direction * order || format.task(one).localeCompare(format.task(other)) || one.number - other.number;
  }

  function rows() {
    const metrics = format.columns.filter((name) => chosen.metrics.has(name));
    const cells = visible().sort(compare);
    const heads = [["task", "Task"], ["system", "System"], ["n", "n"], ...metrics.map((name) => [name, format.metricLabel(name)])];
    const table = dom.el("table.figures", {},
      dom.el("caption.hidden", {}, "Figures of every system on every task"),
      dom.el("thead", {}, dom.el("tr", {}, heads.map(head))),
      dom.el("tbody", {}, cells.map((cell) => row(cell, metrics))));
    if (!cells.length) return dom.el("p.empty", {}, "Nothing matches: tick a system and a task.");
    return [sorter(heads), table];
  }

  function sortBy(key) {
    const [before, direction] = chosen.sort;
    const first = key === "task" || key === "system" ? 1 : -1;
    chosen.sort = [key, before === key ? -direction : first];
    const place = document.querySelector(".table-place");
    dom.replace(place, rows());
    const again = place.querySelector(`[data-key="${CSS.escape(key)}"]`);
    if (again && again.offsetParent) again.focus();
  }

  function head([key, label]) {
    const [by, direction] = chosen.sort;
    const order = by === key ? (direction > 0 ? "ascending" : "descending") : "none";
    const name = key === "task" || key === "system" ? "th" : "th.number";
    return dom.el(name, { scope: "col", "aria-sort": order },
      dom.el("button.sort", { type: "button", "data-key": key, onclick: () => sortBy(key) }, label,
        dom.el("span.arrow", { "aria-hidden": "true" }, by === key ? (direction > 0 ? "▲" : "▼") : "")));
  }

  // On a phone a row is a card without column heads, so sorting has a list of its own.
  function sorter(heads) {
    const options = heads.flatMap(([key, label]) => [[`${key} 1`, `${label}, rising`], [`${key} -1`, `${label}, falling`]]);
    const list = filters.select("Sort by", options, chosen.sort.join(" "), (value) => {
      const at = value.lastIndexOf(" ");
      chosen.sort = [value.slice(0, at), Number(value.slice(at + 1))];
      dom.replace(document.querySelector(".table-place"), rows());
    });
    return dom.el("div.narrow-only", {}, list);
  }

  function row(cell, metrics) {
    const name = format.task(cell);
    const title = cell.mean ? dom.el("span", {}, name) : dom.el("a", { href: router.link("task", cell.task) }, name);
    const variant = store.variant(cell);
    return dom.el(cell.mean ? "tr.mean" : "tr", {},
      dom.el("th", { scope: "row" }, title, marks(cell)),
      dom.el("td.system", {}, store.systemName(cell), variant && dom.el("small", {}, variant)),
      dom.el("td.number", { "data-label": "n" }, cell.items || "–"),
      metrics.map((metric) => dom.el("td.number", { "data-label": format.metricLabel(metric) }, figure(cell, metric))));
  }

  function figure(cell, metric) {
    const found = format.figure(cell, metric);
    if (!found || found.value === null) return dom.el("span.none", { title: "not measured" }, "–");
    const digits = found.unit === "percent" ? 1 : undefined;
    const parts = [dom.el("b", { title: found.note || null }, format.number(found.value, digits))];
    if (found.low !== null) {
      parts.push(" ", dom.el("span.interval", {}, `[${format.number(found.low, digits)}, ${format.number(found.high, digits)}]`));
    }
    if (found.unit === "percent" && found.low !== null) parts.push(whisker(found));
    return parts;
  }

  // The interval on a line from 0 to 100.
  function whisker({ value, low, high }) {
    const place = (node, property, share) => {
      node.style[property] = `${Math.min(100, Math.max(0, share))}%`;
      return node;
    };
    const range = place(place(dom.el("i.range"), "left", low), "right", 100 - high);
    return dom.el("span.whisker", { "aria-hidden": "true" }, range, place(dom.el("i.point"), "left", value));
  }

  function marks(cell) {
    return cell.marks.length > 0 && dom.el("span.marks", {}, cell.marks.map(([word, why]) =>
      dom.el(`span.mark-word.${word.split(" ")[0]}`, { title: why }, word, dom.el("span.hidden", {}, `: ${why}`))));
  }

  function runs() {
    const facts = (run) => [
      ["Run", run.id], ["Decoder", run.decoder], ["Checkpoint", `${run.checkpoint}${run.revision ? ` @ ${run.revision}` : ""}`],
      ["Numbers", `${run.dtype} on ${run.device}, attention ${run.attention}`], ["Machine", run.hardware.join(" | ") || "unknown"],
      ["Seed", run.seed], ["Warm-up", run.warmup], ["Version", `${run.package}${run.commit ? ` (${run.commit.slice(0, 12)})` : ""}`],
      ["Command", run.command || "not recorded"],
    ];
    return dom.el("section", { "aria-labelledby": "runs" }, dom.el("h2", { id: "runs" }, "How they were made"),
      store.index.runs.map((run) => dom.el("details.run", {},
        dom.el("summary", {}, dom.el("b", {}, run.system), dom.el("span.muted", {}, ` ${run.backbone} · ${run.id}`)),
        dom.el("dl.facts", {}, facts(run).map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd", {}, value)])))));
  }

  return { view, marks, figure };
})();
