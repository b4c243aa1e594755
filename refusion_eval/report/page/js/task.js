// One task: its figures by system, and its samples.
const task = (() => {
  const STATES = { right: ["✓", "right"], wrong: ["✗", "wrong"], error: ["!", "error"], unscored: ["?", "unscored"] };
  const FLIPS = "flips";
  const natural = new Intl.Collator("en", { numeric: true });
  const byItem = (one, other) => natural.compare(one.id, other.id) || one.cell.number - other.cell.number || one.number - other.number;
  const ORDERS = {
    item: byItem, "most tokens": (one, other) => other.tokens - one.tokens, slowest: (one, other) => other.seconds - one.seconds,
    "highest TPF": (one, other) => other.tpf - one.tpf, "lowest TPF": (one, other) => one.tpf - other.tpf,
  };
  const HEADINGS = [["id", "Item"], ["verdict", "Verdict"], ["answer", "Answer"], ["gold", "Right answer"], ["question", "Question"],
    ["system", "System"], ["cost", "Tokens, forwards, time"]];
  const HEADINGS_AGAINST = [...HEADINGS.slice(0, 3), ["verdict", "Against"], ["answer", "Its answer"], ...HEADINGS.slice(3, 5)];
  const NAMES = ["system", "against", "verdict", "order", "find"];

  async function view(main, name) {
    const cells = store.cells.filter((cell) => cell.task === name && !cell.mean);
    if (!cells.length) return overview.view(main);
    router.trail(["Overview", "#/"], [format.task(cells[0]), null]);
    const chosen = Object.fromEntries(NAMES.map((kind) => [kind, router.query().get(kind) || ""]));
    for (const kind of ["system", "against"]) {
      if (!cells.some((cell) => String(cell.number) === chosen[kind])) chosen[kind] = "";
    }
    const rows = (await Promise.all(cells.map(samples))).flat();
    const number = dom.el("p.caption", { role: "status" });
    const href = (row) => (row.other ? router.link("pair", row.cell.number, row.place, row.other.cell.number, row.other.place)
      : router.link("sample", row.cell.number, row.place));
    const samplesList = list.create({ label: "Samples; arrows move, Enter opens", draw, href, css: (row) => (row.other ? ".against" : "") });
    let found = [];
    let last = 0;
    const refresh = async () => {
      const turn = ++last;
      if (chosen.find.trim()) dom.replace(number, "Searching …");
      const next = await select(cells, rows, chosen);
      if (turn !== last) return; // the reader has typed on
      found = next;
      samplesList.show(found, found[0]?.other ? HEADINGS_AGAINST : HEADINGS);
      dom.replace(number, `${found.length.toLocaleString("en")} of ${format.count(rows.length, "sample")}`);
    };
    const metrics = format.columns.filter((metric) => cells.some((cell) => format.figure(cell, metric)));
    const heads = [["task", "Task"], ["system", "System"], ["n", "n"], ...metrics.map((metric) => [metric, format.metricLabel(metric)])];
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, format.task(cells[0])), about(cells[0])),
      dom.el("section", { "aria-labelledby": "samples" },
        dom.el("div.section-head", {}, dom.el("h2", { id: "samples" }, "Samples"), controls(cells, chosen, refresh)),
        dom.el("div.section-head", {}, number, files.buttons(name, () => found.map(exported))), samplesList.node),
      dom.el("section", { "aria-labelledby": "figures" }, dom.el("div.section-head", {}, dom.el("h2", { id: "figures" }, "Figures")),
        dom.el("div.table-place.limited.narrow", { tabindex: "0", role: "region", "aria-label": "Figures by system" },
          overview.table(cells, metrics, heads, ["", 1], () => {}))),
      steps(cells.filter((cell) => cell.steps)));
    await refresh();
    return samplesList.close;
  }

  // Where the forwards of the answers went, as `speed --steps` tells it.
  function steps(cells) {
    const { headings: [, ...headings], notes } = store.index.steps;
    // A list of numbers is broken where it is long; a number stands under others.
    const css = headings.map((_, place) => (cells.some((cell) => cell.steps[place + 1].includes(" ")) ? "" : ".number"));
    return cells.length > 0 && dom.el("section", { "aria-labelledby": "steps" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "steps" }, "Where forwards go")),
      dom.el("div.table-place.limited.narrow", { tabindex: "0", role: "region", "aria-label": "Where forwards go" },
        dom.el("table.figures.plain-table", {},
          dom.el("thead", {}, dom.el("tr", {}, dom.el("th", { scope: "col" }, "System"),
            headings.map((head, place) => dom.el(`th${css[place]}`, { scope: "col" }, head)))),
          dom.el("tbody", {}, cells.map((cell) => dom.el("tr", {}, dom.el("th.system", { scope: "row" }, store.title(cell)),
            cell.steps.slice(1).map((text, place) => dom.el(`td${css[place]}`, { "data-label": headings[place] }, text || "–"))))))),
      notes.map((note) => dom.el("p.caption", {}, note)));
  }

  function about(cell) {
    if (cell.sealed) return dom.el("p.lead", {}, "GPQA's authors ask that its questions appear nowhere in plain text: items are shown by id and answer only.");
    if (cell.mini) return dom.el("p.lead", {}, "mini: a synthetic look-alike of this project, not the real benchmark.");
    return null;
  }

  async function samples(cell) {
    const columns = await store.list(cell);
    if (!columns) return [];
    const { question, gold } = await store.questions(cell);
    return columns.item_id.map((id, place) => ({
      cell, place, id, number: columns.number[place], state: columns.state[place], tokens: columns.tokens[place],
      forwards: columns.forwards[place], seconds: columns.seconds[place], extracted: columns.extracted[place],
      question: question[columns.question[place]] || "", gold: gold[columns.question[place]] || "",
      tpf: columns.forwards[place] ? columns.tokens[place] / columns.forwards[place] : 0, other: null,
    }));
  }

  // The rows that the choices leave. Against another system, each row has that system's sample of the same item.
  async function select(cells, rows, { system, against, verdict, order, find }) {
    const others = new Map(rows.filter((row) => String(row.cell.number) === against).map((row) => [`${row.id} ${row.number}`, row]));
    let found = rows.filter((row) => !system || String(row.cell.number) === system);
    if (others.size) {
      found = found.filter((row) => String(row.cell.number) !== against && others.has(`${row.id} ${row.number}`))
        .map((row) => ({ ...row, other: others.get(`${row.id} ${row.number}`) }));
    }
    if (verdict === FLIPS) found = found.filter((row) => row.other && (row.state === "right") !== (row.other.state === "right"));
    else if (verdict) found = found.filter((row) => row.state === verdict);
    const text = find.trim().toLowerCase();
    if (text) {
      const texts = new Map(await Promise.all(cells.map(async (cell) => [cell, cell.list === null ? [] : await store.texts(cell)])));
      const has = (row) => [row.id, row.extracted || "", row.gold].some((one) => one.toLowerCase().includes(text)) || texts.get(row.cell)[row.place].includes(text);
      found = found.filter((row) => has(row) || (row.other && has(row.other)));
    }
    return found.sort((one, other) => (ORDERS[order] || byItem)(one, other) || byItem(one, other));
  }

  function controls(cells, chosen, refresh) {
    const set = (name) => (value) => {
      chosen[name] = value;
      router.note({ [name]: value });
      refresh();
    };
    const names = cells.map((cell) => [String(cell.number), store.title(cell)]);
    const search = dom.el("input", { type: "search", value: chosen.find, placeholder: "prompt, output, id, answer", oninput: () => set("find")(search.value) });
    const verdict = filters.select("Verdict", [["", "all"], ...Object.entries(STATES).map(([key, [, word]]) => [key, word]), [FLIPS, "flips only"]], chosen.verdict, (value) => {
      if (value === FLIPS && !chosen.against) for (const [name, list] of [["system", system], ["against", against]]) pick(name, list);
      set("verdict")(value);
    });
    const [system, against] = [["System", "system", "all"], ["Against", "against", "none"]].map(([title, name, none]) =>
      filters.select(title, [["", none], ...names], chosen[name], set(name)));
    // Flips are between two systems: the first two, unless the reader has chosen.
    function pick(name, node) {
      if (chosen[name]) return;
      const free = names.find(([key]) => key !== chosen.system && key !== chosen.against) || ["", ""];
      [chosen[name]] = free;
      node.querySelector("select").value = chosen[name];
      router.note({ [name]: chosen[name] });
    }
    return dom.el("div.controls", { role: "group", "aria-label": "Filters" },
      cells.length > 1 && [system, against], verdict,
      filters.select("Order", Object.keys(ORDERS).map((key) => [key, key]), chosen.order || "item", set("order")),
      dom.el("label.field", {}, dom.el("span", {}, "Find"), search));
  }

  function verdict(state) {
    const [sign, word] = STATES[state];
    return dom.el(`span.verdict.${state}`, {}, dom.el("span", { "aria-hidden": "true" }, sign), dom.el("span.word", {}, word));
  }

  function draw(row) {
    const answer = ({ extracted }) => dom.el("span.answer", {}, extracted === null ? "–" : extracted);
    const gold = dom.el("span.gold", {}, row.gold && [dom.el("span.hidden", {}, "right answer: "), row.gold]);
    const name = dom.el("span.id", {}, row.number ? `${row.id} #${row.number}` : row.id);
    const question = dom.el("span.question", {}, row.question);
    if (row.other) return [name, verdict(row.state), answer(row), verdict(row.other.state), answer(row.other), gold, question];
    return [name, verdict(row.state), answer(row), gold, question, dom.el("span.system", {}, store.title(row.cell)),
      dom.el("span.cost", {}, `${row.tokens ?? "–"} tok · ${row.forwards} fwd`, dom.el("span.time", {}, ` · ${format.seconds(row.seconds)}`))];
  }

  function exported(row) {
    const own = ({ id, number, cell, state, question, gold, extracted, tokens, forwards, seconds }) =>
      ({ item: id, sample: number, system: store.title(cell), verdict: state, question, gold, answer: extracted, tokens, forwards, seconds });
    if (!row.other) return own(row);
    const { system, verdict: state, answer, tokens, forwards, seconds } = own(row.other);
    return { ...own(row), against: system, against_verdict: state, against_answer: answer, against_tokens: tokens, against_forwards: forwards, against_seconds: seconds };
  }

  return { view, verdict };
})();
