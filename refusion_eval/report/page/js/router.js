// Which view the address names, and the way back. #/  #/task/NAME  #/sample/CELL/ROW  #/pair/CELL/ROW/CELL/ROW
// Behind a question mark are the reader's choices in the view, so that an address shows what its sender saw.
const router = (() => {
  const views = {};
  let leave = null;

  function link(...parts) {
    return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
  }

  function parts() {
    try {
      return location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
    } catch {
      return [];
    }
  }

  const query = () => new URLSearchParams(location.hash.split("?")[1] || "");

  // Writes choices into the address without a step in the history; null leaves one out.
  function note(choices) {
    const all = query();
    for (const [name, value] of Object.entries(choices)) {
      if (value === null || value === "") all.delete(name);
      else all.set(name, value);
    }
    history.replaceState(null, "", [location.hash.split("?")[0] || "#/", String(all)].filter(Boolean).join("?"));
  }

  async function show() {
    if (leave) leave();
    leave = null;
    const [name = "", ...rest] = parts();
    const main = document.getElementById("main");
    const view = views[name] || views[""];
    leave = (await view(main, ...rest)) || null;
    window.scrollTo(0, 0);
  }

  // The trail above the view: pairs of a text and the address it leads to, null for where we are.
  function trail(...steps) {
    const nodes = steps.map(([text, href]) =>
      dom.el("li", {}, href ? dom.el("a", { href }, text) : dom.el("span", { "aria-current": "page" }, text)));
    dom.replace(document.getElementById("trail"), dom.el("ol", {}, nodes));
    document.title = [store.index.title, ...steps.map(([text]) => text)].reverse().join(" · ");
  }

  function start() {
    window.addEventListener("hashchange", async () => {
      await show();
      document.getElementById("main").focus({ preventScroll: true });
    });
    return show();
  }

  return { views, link, query, note, trail, start };
})();
