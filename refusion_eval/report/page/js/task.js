// One task: its figures by system, and its samples.
const task = (() => {
  const STATES = { right: ["✓", "right"], wrong: ["✗", "wrong"], error: ["!", "error"], unscored: ["?", "unscored"] };
  const chosen = { system: "", state: "", text: "", order: "item" };
  const ORDERS = {
    item: (one, other) => one.place - other.place || one.cell.number - other.cell.number, "most tokens": (one, other) => other.tokens - one.tokens, slowest: (one, other) => other.seconds - one.seconds,
    "highest TPF": (one, other) => other.tpf - one.tpf, "lowest TPF": (one, other) => one.tpf - other.tpf,
  };

  async function view(main, name) {
    const cells = store.cells.filter((cell) => cell.task === name && !cell.mean);
    if (!cells.length) return overview.view(main);
    router.trail(["Overview", "#/"], [format.task(cells[0]), null]);
    const rows = (await Promise.all(cells.map(samples))).flat();
    if (!cells.some((cell) => String(cell.number) === chosen.system)) chosen.system = "";
    const number = dom.el("p.caption", { role: "status" });
    const samplesList = list.create({ label: "Samples; arrows move, Enter opens", draw, open: (row) => {
      location.hash = router.link("sample", row.cell.number, row.place);
    } });
    const refresh = () => {
      const found = select(rows);
      samplesList.show(found);
      dom.replace(number, `${found.length.toLocaleString("en")} of ${format.count(rows.length, "sample")}`);
    };
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, format.task(cells[0])), about(cells[0])),
      dom.el("div.cards", {}, cells.map(card)),
      dom.el("section", { "aria-labelledby": "samples" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "samples" }, "Samples"), controls(cells, refresh)),
        number, samplesList.node));
    refresh();
    return samplesList.close;
  }

  function about(cell) {
    if (cell.sealed) return dom.el("p.lead", {}, "GPQA's authors ask that its questions appear nowhere in plain text: items are shown by id and answer only.");
    if (cell.mini) return dom.el("p.lead", {}, "mini: a synthetic look-alike of this project, not the real benchmark.");
    return null;
  }

  async function samples(cell) {
    const columns = await store.list(cell);
    if (!columns) return [];
    return columns.item_id.map((id, place) => ({
      cell, place, id, number: columns.number[place], state: columns.state[place], tokens: columns.tokens[place],
      forwards: columns.forwards[place], seconds: columns.seconds[place], extracted: columns.extracted[place],
      tpf: columns.forwards[place] ? columns.tokens[place] / columns.forwards[place] : 0,
    }));
  }

  function select(rows) {
    const text = chosen.text.trim().toLowerCase();
    const found = rows.filter((row) => (!chosen.system || String(row.cell.number) === chosen.system)
      && (!chosen.state || row.state === chosen.state)
      && (!text || row.id.toLowerCase().includes(text) || (row.extracted || "").toLowerCase().includes(text)));
    return found.sort(ORDERS[chosen.order]);
  }

  const title = (cell) => [store.systemName(cell), store.variant(cell)].filter(Boolean).join(" · ");

  function controls(cells, refresh) {
    const set = (name) => (value) => {
      chosen[name] = value;
      refresh();
    };
    const search = dom.el("input", { type: "search", value: chosen.text, placeholder: "id or answer", oninput: () => set("text")(search.value) });
    return dom.el("div.controls", { role: "group", "aria-label": "Filters" },
      cells.length > 1 && filters.select("System", [["", "all"], ...cells.map((cell) => [String(cell.number), title(cell)])], chosen.system, set("system")),
      filters.select("Verdict", [["", "all"], ...Object.entries(STATES).map(([key, [, word]]) => [key, word])], chosen.state, set("state")),
      filters.select("Order", Object.keys(ORDERS).map((key) => [key, key]), chosen.order, set("order")),
      dom.el("label.field", {}, dom.el("span", {}, "Find"), search));
  }

  function card(cell) {
    const metrics = format.columns.filter((name) => format.figure(cell, name));
    const main = metrics.filter((name) => format.MAIN.includes(name));
    const more = metrics.filter((name) => !format.MAIN.includes(name));
    const figures = (names) => dom.el("dl.figures-list", {}, names.map((name) => dom.el("div", {},
      dom.el("dt", {}, format.metricLabel(name)), dom.el("dd", {}, overview.figure(cell, name)))));
    return dom.el("section.card", { "aria-label": title(cell) },
      dom.el("h2", {}, title(cell), overview.marks(cell)),
      figures(main),
      more.length > 0 && dom.el("details", {}, dom.el("summary.more", {}, `${more.length} more figures`), figures(more)),
      metrics.length === 0 && dom.el("p.muted", {}, "No figures yet."));
  }

  function verdict(state) {
    const [sign, word] = STATES[state];
    return dom.el(`span.verdict.${state}`, {}, dom.el("span", { "aria-hidden": "true" }, sign), dom.el("span.word", {}, word));
  }

  function draw(row) {
    return [
      verdict(row.state),
      dom.el("span.id", {}, row.number ? `${row.id} #${row.number}` : row.id),
      dom.el("span.system", {}, title(row.cell)),
      dom.el("span.answer", {}, row.extracted === null ? "" : row.extracted),
      dom.el("span.cost", {}, `${row.tokens} tok · ${row.forwards} fwd`, dom.el("span.time", {}, ` · ${format.seconds(row.seconds)}`)),
    ];
  }

  return { view, verdict, title };
})();
