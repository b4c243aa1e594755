// What is shown, as a file for other programs.
const files = (() => {
  const cell = (value) => (value === null || value === undefined ? "" : `"${String(value).replaceAll('"', '""')}"`);

  // rows: objects with the same keys.
  function csv(rows) {
    const names = Object.keys(rows[0] || {});
    return [names.join(","), ...rows.map((row) => names.map((name) => cell(row[name])).join(","))].join("\r\n");
  }

  function save(name, type, text) {
    const href = URL.createObjectURL(new Blob([text.toWellFormed()], { type }));
    dom.el("a", { href, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1000);
  }

  // Two buttons that save the rows as they are when they are pressed.
  function buttons(name, rows) {
    const button = (ending, type, write) => dom.el("button.button", { type: "button", title: `Save as ${name}.${ending}`,
      onclick: () => save(`${name}.${ending}`, type, write(rows())) }, ending.toUpperCase());
    return dom.el("div.save", { role: "group", "aria-label": "Save what is shown" },
      button("csv", "text/csv", csv), button("json", "application/json", (all) => JSON.stringify(all, null, 1)));
  }

  return { buttons };
})();
