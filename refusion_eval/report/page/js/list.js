// A long list of which only the rows in sight exist. It is one stop of the tab key; arrows move within it.
const list = (() => {
  const ROW = 44;
  const HEAD = 34; // of the headings, which stay in sight above the rows
  const BEYOND = 8;

  // rows: what to show; draw(row): the cells of one; href(row): where it leads; css(row): further classes.
  function create({ label, draw, href, css }) {
    let rows = [];
    let current = 0;
    const head = dom.el("div.list-head", { "aria-hidden": "true" });
    const space = dom.el("div.space");
    const box = dom.el("div.list", { role: "listbox", tabindex: "0", "aria-label": label, onscroll: paint, onkeydown: key });
    head.style.height = `${HEAD}px`;
    box.append(head, space);
    const observer = new ResizeObserver(paint);
    observer.observe(box);

    // headings: the class and the heading of each cell of a row.
    function show(next, headings) {
      rows = next;
      head.className = `list-head${rows.length ? css(rows[0]).replaceAll(".", " ") : ""}`;
      dom.replace(head, headings.map(([name, text]) => dom.el(`span.${name}`, {}, text)));
      current = Math.min(current, Math.max(0, rows.length - 1));
      space.style.height = `${rows.length * ROW}px`;
      paint();
    }

    function paint() {
      const first = Math.max(0, Math.floor(box.scrollTop / ROW) - BEYOND);
      const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + BEYOND);
      const nodes = [];
      for (let place = first; place < last; place += 1) {
        const node = dom.el(`a.row${css(rows[place])}${place === current ? ".current" : ""}`, {
          role: "option", id: `row-${place}`, "aria-selected": place === current ? "true" : "false", tabindex: "-1",
          "aria-setsize": rows.length, "aria-posinset": place + 1, href: href(rows[place]),
        }, draw(rows[place]));
        node.style.transform = `translateY(${place * ROW}px)`;
        nodes.push(node);
      }
      space.replaceChildren(...nodes);
      if (rows.length) box.setAttribute("aria-activedescendant", `row-${current}`);
      else box.removeAttribute("aria-activedescendant");
    }

    function key(event) {
      const page = Math.max(1, Math.floor((box.clientHeight - HEAD) / ROW) - 1);
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
      if (event.key in moves) move(current + moves[event.key]);
      else if (event.key === "Enter" && rows.length) location.hash = href(rows[current]);
      else return;
      event.preventDefault();
    }

    function move(place) {
      current = Math.min(rows.length - 1, Math.max(0, place));
      const top = current * ROW;
      if (top < box.scrollTop) box.scrollTop = top;
      else if (HEAD + top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = HEAD + top + ROW - box.clientHeight;
      paint();
    }

    return { node: box, show, close: () => observer.disconnect() };
  }

  return { create };
})();
