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

  function section() {
    const all = store.index.runs.map(facts);
    const names = [...new Set(all.flatMap(Object.keys))];
    const isSame = (name) => all.every((one) => one[name] === all[0][name]);
    const [same, different] = [names.filter(isSame), names.filter((name) => !isSame(name))];
    const list = (entries) => dom.el("dl.facts", {}, entries.map(([name, value]) => [dom.el("dt", {}, name), dom.el("dd", {}, value)]));
    return dom.el("section", { "aria-labelledby": "runs" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "runs" }, "How they were made")),
      different.length > 0 && dom.el("div.table-place.limited", { tabindex: "0", role: "region", "aria-label": "What differs between the runs" },
        dom.el("table.figures.plain-table", {}, dom.el("caption", {}, "What differs"),
          dom.el("thead", {}, dom.el("tr", {}, ["Run", ...different].map((name) => dom.el("th", { scope: "col" }, name)))),
          dom.el("tbody", {}, store.index.runs.map((run, number) => dom.el("tr", {}, dom.el("th", { scope: "row" }, run.id),
            different.map((name) => dom.el("td", { "data-label": name }, all[number][name] ?? "–"))))))),
      dom.el("details.run", {}, dom.el("summary", {}, all.length > 1 ? "What all have in common" : "Settings and machine"),
        list(same.map((name) => [name, all[0][name]]))),
      dom.el("details.run", {}, dom.el("summary", {}, "Commands"),
        list(store.index.runs.map((run) => [run.id, dom.el("code", {}, run.command || "not recorded")]))));
  }

  return { section };
})();
