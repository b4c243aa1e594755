// Elements are made here and nowhere else. Text becomes text nodes, so nothing from a record is ever read as markup.
const dom = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  // el("a.name", {href: "#/"}, child, "text", null, [more]): attributes starting with "on" are listeners.
  function el(selector, attributes = {}, ...children) {
    const [tag, ...classes] = selector.split(".");
    const node = document.createElement(tag || "div");
    if (classes.length) node.className = classes.join(" ");
    for (const [name, value] of Object.entries(attributes)) set(node, name, value);
    append(node, children);
    return node;
  }

  function set(node, name, value) {
    if (value === null || value === undefined || value === false) return;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }

  function append(node, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return node;
  }

  function replace(node, ...children) {
    node.replaceChildren();
    return append(node, children);
  }

  // A line icon of one path, for buttons whose label says the same in words.
  function icon(path) {
    const svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of [["viewBox", "0 0 24 24"], ["aria-hidden", "true"], ["class", "icon"]]) {
      svg.setAttribute(name, value);
    }
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("d", path);
    svg.append(line);
    return svg;
  }

  return { el, append, replace, icon };
})();
