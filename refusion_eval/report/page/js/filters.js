// A button that opens a list of boxes to tick; all ticked is no filter. Works by mouse, touch and keyboard.
const filters = (() => {
  function choice(title, options, chosen, changed) {
    const state = dom.el("span.count");
    const summary = dom.el("summary", {}, title, state);
    const boxes = options.map(([value, label]) => {
      const box = dom.el("input", { type: "checkbox", checked: chosen.has(value), onchange: () => {
        if (box.checked) chosen.add(value);
        else chosen.delete(value);
        tell();
        changed();
      } });
      return [box, value, dom.el("label", {}, box, dom.el("span", {}, label))];
    });
    const all = (on) => dom.el("button.quiet", { type: "button", onclick: () => {
      for (const [box, value] of boxes) {
        box.checked = on;
        if (on) chosen.add(value);
        else chosen.delete(value);
      }
      tell();
      changed();
    } }, on ? "All" : "None");
    const details = dom.el("details.choice", { onkeydown: (event) => {
      if (event.key === "Escape" && details.open) {
        details.open = false;
        summary.focus();
      }
    } }, summary, dom.el("div.options", { role: "group", "aria-label": title },
      dom.el("div.both", {}, all(true), all(false)), boxes.map(([, , label]) => label)));
    function tell() {
      dom.replace(state, chosen.size === options.length ? "all" : `${chosen.size} of ${options.length}`);
    }
    tell();
    return details;
  }

  // Only one list is open, and a press anywhere else closes it.
  document.addEventListener("pointerdown", (event) => {
    for (const open of document.querySelectorAll("details.choice[open]")) {
      if (!open.contains(event.target)) open.open = false;
    }
  });

  function select(title, options, value, changed) {
    const list = dom.el("select", { onchange: () => changed(list.value) },
      options.map(([key, label]) => dom.el("option", { value: key }, label)));
    list.value = value;
    return dom.el("label.field", {}, dom.el("span", {}, title), list);
  }

  return { choice, select };
})();
