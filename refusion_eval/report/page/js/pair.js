// Two samples of one item side by side.
const pair = (() => {
  async function view(main, ...address) {
    const sides = await Promise.all([address.slice(0, 2), address.slice(2, 4)].map(([cell, row]) => sample.read(cell, row)));
    if (!sides.every(Boolean)) return overview.view(main);
    const [{ cell, name, asked }] = sides;
    router.trail(["Overview", "#/"], [format.task(cell), router.link("task", cell.task)], [name, null]);
    dom.replace(main,
      dom.el("div.headline", {}, dom.el("h1", {}, `Item ${name}`), dom.el("p.lead", {}, format.task(cell))),
      dom.el("div.columns", {}, sides.map((side, number) => dom.el("section", { "aria-label": `${number ? "Other" : "First"} system, ${store.title(side.cell)}` },
        dom.el("h2.side", {}, dom.el("a", { href: router.link("sample", side.cell.number, side.row) }, store.title(side.cell)),
          task.verdict(side.columns.state[side.row])),
        sample.counts(side), sample.answer(side, ` of ${number ? "the other" : "the first"} system`)))),
      sample.question(asked, cell));
    return null;
  }

  return { view };
})();
