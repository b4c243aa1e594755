// One sample: what was asked, what came out, what was made of it, and how it was decoded.
const sample = (() => {
  // Everything about a sample, null if there is none at this place of the address.
  async function read(cellNumber, place) {
    const cell = store.cells[Number(cellNumber)];
    const columns = cell && await store.list(cell);
    const row = Number(place);
    if (!columns || !columns.bodies[row]) return null;
    const [body, asked] = await Promise.all([store.entry(columns.bodies[row]), store.entry(columns.asked[row])]);
    const [id, number] = [columns.item_id[row], columns.number[row]];
    return { cell, columns, row, body, asked, id, number, name: number ? `${id} #${number}` : id };
  }

  async function view(main, ...address) {
    const found = await read(...address);
    if (!found) return overview.view(main);
    const { cell, columns, row, body, asked, name } = found;
    router.trail(["Overview", "#/"], [format.task(cell), router.link("task", cell.task)], [name, null]);
    const slotSize = Number(cell.settings.slot_size) || 1;
    const film = body.replay && replay.create(body.replay, slotSize);
    const to = (step) => (columns.bodies[row + step] ? router.link("sample", cell.number, row + step) : null);
    dom.replace(main,
      dom.el("div.headline", {},
        dom.el("h1", {}, `Item ${name}`, task.verdict(columns.state[row])),
        dom.el("p.lead", {}, `${store.title(cell)} · ${format.task(cell)}`, overview.marks(cell, true)),
        dom.el("nav.beside", { "aria-label": "Neighbouring samples" }, step("← Previous", to(-1)), step("Next →", to(1)))),
      counts(found),
      await others(found),
      film ? film.node : dom.el("p.empty", {}, body.error ? "It failed before anything was decoded." : "No trace is recorded, so there is no replay."),
      dom.el("div.columns", {}, question(asked, cell), answer(found)),
      settings(body));
    return film ? film.close : null;
  }

  const step = (text, href) => (href ? dom.el("a.button", { href }, text) : dom.el("span.button.off", { "aria-disabled": "true" }, text));

  function counts({ columns, body, row }) {
    const [tokens, forwards, seconds] = [columns.tokens[row], columns.forwards[row], columns.seconds[row]];
    const alone = body.batchSize === 1;
    const facts = [
      ["Tokens kept", tokens ?? "–"], ["Forwards", forwards], ["Tokens a forward", forwards ? format.number(tokens / forwards, 2) : "–"],
      [alone ? "Time" : `Time, in a batch of ${body.batchSize}`, format.seconds(seconds)],
      ["Tokens a second", alone && seconds && tokens !== null ? format.number(tokens / seconds, 1) : "–"],
      ["Prompt tokens", body.promptTokens], ["Ended by", body.stop || "–"],
    ];
    return dom.el("dl.tiles", {}, facts.map(([name, value]) => dom.el("div", {}, dom.el("dt", {}, name), dom.el("dd", {}, value))));
  }

  // The same question to other systems, or drawn again by this one.
  async function others({ cell, row, id, number }) {
    const beside = store.cells.filter((one) => one.task === cell.task && one.list !== null);
    const found = (await Promise.all(beside.map(async (one) => {
      const columns = await store.list(one);
      return columns.item_id.map((other, place) => [other, place]).filter(([other, place]) =>
        other === id && !(one.number === cell.number && columns.number[place] === number))
        .slice(0, 8).map(([, place]) => dom.el("li", {}, dom.el("a", { href: router.link("sample", one.number, place) },
          columns.number[place] || one.number === cell.number ? `${store.title(one)} #${columns.number[place]}` : store.title(one)),
        task.verdict(columns.state[place]),
        dom.el("a", { href: router.link("pair", cell.number, row, one.number, place) }, "side by side")));
    }))).flat();
    return found.length > 0 && dom.el("div.others", {}, dom.el("h2", {}, "Same item"), dom.el("ul", {}, found));
  }

  const block = (title, text, none, note, of = "") => dom.el("section.text", { "aria-label": `${title}${of}` }, dom.el("h2", {}, title),
    text === null || text === "" ? dom.el("p.muted", {}, none) : dom.el("pre", { tabindex: "0" }, text),
    note && dom.el("p.caption", {}, note));

  function question(asked, cell) {
    if (cell.sealed) return block("Prompt", null, "Withheld: GPQA's authors ask that its questions appear nowhere in plain text.");
    return block("Prompt", asked.prompt, asked.note || "Not at hand.", asked.prompt === null ? "" : asked.note);
  }

  // of: what tells the headings apart where there are two samples.
  function answer({ body, asked }, of = "") {
    const scores = Object.entries(body.scores).map(([name, value]) => `${name} ${value}`).join(", ");
    const rows = [
      ["Extracted", body.extracted === null ? "nothing" : body.extracted], ["Gold", asked.gold === null ? "not at hand" : asked.gold],
      ["Verdict", body.verdict || "none yet"], ["Why", body.reason], ["Other scores", scores], ["Scorer", body.scorer], ["Isolation", body.tier],
    ].filter(([, value]) => value);
    const output = body.error === null ? block("Output", body.output, body.withheld || "Empty.", "", of) : block("Error", body.error, "", "", of);
    return dom.el("div", {}, output, dom.el("section.text", { "aria-label": `Verdict${of}` }, dom.el("h2", {}, "Verdict"),
      dom.el("dl.facts", {}, rows.map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd.said", {}, value)]))));
  }

  function settings(body) {
    const about = [["Machine", body.machine], ["Warmed up", body.warm ? "yes" : "no: in no speed figure"], ["Recorded", body.created], ["Process", body.process]];
    return dom.el("details.run", {}, dom.el("summary", {}, dom.el("b", {}, "Settings in force")),
      dom.el("dl.facts", {}, body.settings.map(([name, value, source]) => [dom.el("dt", {}, name),
        dom.el("dd", {}, value, source && dom.el("span.muted", {}, ` ${source}`))]),
      about.map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd", {}, value || "–")])));
  }

  return { view, read, counts, question, answer };
})();
