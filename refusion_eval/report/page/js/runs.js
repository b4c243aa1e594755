// How the runs were made: what differs in a table, what all have in common below it.
const runs = (() => {
  // The settings of a run's tasks; one that differs among them says so.
  function settings(number) {
    const cells = store.cells.filter((cell) => cell.run === number && !cell.mean);
    const names = [...new Set(cells.flatMap((cell) => Object.keys(cell.settings)))].sort();
    return Object.fromEntries(names.map((name) => {
      const values = [...new Set(cells.filter((cell) => name in cell.settings).map((cell) => cell.settings[name]))];
      return [name, values.length === 1 ? values[0] : `by task: ${values.join(", ")}`];
    }));
  }

  function facts(run, number) {
    return {
      Decoder: run.decoder, Checkpoint: `${run.checkpoint}${run.revision ? ` @ ${run.revision.slice(0, 12)}` : ""}`,
      Backbone: run.backbone, Numbers: `${run.dtype} on ${run.device}`, Attention: run.attention, Machine: run.hardware.join(" | ") || "unknown",
      Seed: run.seed, "Warm-up": run.warmup, Version: `${run.package}${run.commit ? ` (${run.commit.slice(0, 12)})` : ""}`,
      Began: format.date(run.began), Ended: format.date(run.ended), "Time of all samples": format.seconds(run.seconds), ...settings(number),
    };
  }

  // A command that one press selects whole, with a button that copies it, or leaves it selected where the browser forbids that.
  function command(text) {
    const code = dom.el("code", {}, text);
    const copy = dom.el("button.button", { type: "button", "aria-live": "polite", onclick: () => {
      getSelection().selectAllChildren(code);
      // The newer interface, navigator.clipboard, is refused to files and to pages without TLS.
      copy.textContent = document.execCommand("copy") ? "Copied" : "Selected";
    } }, "Copy");
    return dom.el("div.command", {}, code, copy);
  }

  // A note about each run that lacks samples, for each command that continues some of its tasks.
  function unfinished() {
    return store.index.runs.flatMap((run, number) => {
      const tasks = new Map();
      for (const cell of store.cells.filter((one) => one.run === number && !one.mean))
        for (const { amount, advice } of cell.marks.filter(({ kind }) => kind === "unfinished"))
          tasks.set(advice, [...(tasks.get(advice) ?? []), `${format.task(cell)} ${amount}`]);
      return [...tasks].map(([advice, lacking]) => [
        `${run.id} is unfinished: ${lacking.join(", ")} samples are there. To continue it${advice ? ":" : ", run it again."}`,
        advice && command(advice)]);
    });
  }

  function section() {
    const all = store.index.runs.map(facts);
    const names = [...new Set(all.flatMap(Object.keys))];
    const isSame = (name) => all.every((one) => one[name] === all[0][name]);
    const [same, different] = [names.filter(isSame), names.filter((name) => !isSame(name))];
    const list = (entries) => dom.el("dl.facts", {}, entries.map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd", {}, value)]));
    // The more numerous of runs and differences are rows, so that the table is long rather than wide.
    const ids = store.index.runs.map(({ id }) => id);
    const [down, across] = ids.length > different.length ? [ids, different] : [different, ids];
    const value = (row, column) => (down === ids ? all[row][different[column]] : all[column][different[row]]) ?? "–";
    return dom.el("section", { "aria-labelledby": "runs" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "runs" }, "How they were made")),
      different.length > 0 && dom.el("div.table-place.limited", { tabindex: "0", role: "region", "aria-label": "What differs between the runs" },
        dom.el("table.figures.plain-table", {}, dom.el("caption", {}, "What differs"),
          dom.el("thead", {}, dom.el("tr", {}, ["Run", ...across].map((name) => dom.el("th", { scope: "col" }, name)))),
          dom.el("tbody", {}, down.map((name, row) => dom.el("tr", {}, dom.el("th", { scope: "row" }, name),
            across.map((label, column) => dom.el("td", { "data-label": label }, value(row, column)))))))),
      dom.el("details.run", {}, dom.el("summary", {}, all.length > 1 ? "What all have in common" : "Settings and machine"),
        list(same.map((name) => [name, all[0][name]]))),
      dom.el("details.run", {}, dom.el("summary", {}, "Commands"),
        list(store.index.runs.map((run) => [run.id, run.command ? command(run.command) : "not recorded"]))));
  }

  return { section, unfinished, command };
})();
