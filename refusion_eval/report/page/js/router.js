// Which view the address names, and the way back. #/  #/task/NAME  #/sample/CELL/ROW
const router = (() => {
  const views = {};
  let leave = null;

  function link(...parts) {
    return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
  }

  function parts() {
    try {
      return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
    } catch {
      return [];
    }
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
    document.title = ["refusion_eval report", ...steps.map(([text]) => text)].reverse().join(" · ");
  }

  function start() {
    window.addEventListener("hashchange", async () => {
      await show();
      document.getElementById("main").focus({ preventScroll: true });
    });
    return show();
  }

  return { views, link, trail, start, show };
})();
