// The replay of one decoding: the text in its states, a slider, buttons, and keys wherever no field has the focus.
const replay = (() => {
  const DELAY = 450;
  const SPEEDS = [["0.5", "½×"], ["1", "1×"], ["2", "2×"], ["4", "4×"]];
  const NAMES = new Map(Object.entries(store.index.states));
  const ICONS = { first: "M6 5v14M19 5l-9 7 9 7z", back: "M16 5l-9 7 9 7z", play: "M7 4l13 8-13 8z", pause: "M8 5v14M16 5v14",
    next: "M8 5l9 7-9 7z", last: "M18 5v14M5 5l9 7-9 7z" };
  const OWN_SPACE = "button, a, summary, select, textarea, input:not([type=range])";
  const OWN_ARROWS = "input, select, textarea, [role=listbox]";
  let speed = "1";

  function create(record, slotSize) {
    const film = player.create(record);
    const last = film.steps.length - 1;
    const asked = router.query().get("step");
    let at = -1;
    let timer = null;

    const spans = Array.from({ length: film.positions }, (_, position) =>
      dom.el(slotSize > 1 && position % slotSize === 0 && position > 0 ? "span.pos.slot" : "span.pos", {}, dom.el("i")));
    // Every position takes the room of its final text from the start, so that the text does not move.
    spans.forEach((span, position) => { span.dataset.room = film.finals[position] || "·"; });
    const used = new Set(film.steps.flatMap((step) => step.changes.map(([state]) => state)));
    const text = dom.el("div.decoded", { tabindex: "0", role: "group", "aria-label": "Text as it is decoded" }, spans);
    const slider = dom.el("input", { type: "range", min: "-1", max: String(last), step: "1", "aria-label": "Step", oninput: () => go(Number(slider.value)) });
    const where = dom.el("p.where");
    const what = dom.el("p.what", { role: "status" });
    const play = dom.el("button.round", { type: "button", onclick: toggle });
    const button = (name, label, action) => dom.el("button.round", { type: "button", "aria-label": label, title: label, onclick: action }, dom.icon(ICONS[name]));

    const node = dom.el("section.replay", { "aria-labelledby": "replay" },
      dom.el("div.section-head", {}, dom.el("h2", { id: "replay" }, "How it was decoded"),
        dom.el("p.keys", {}, dom.el("kbd", {}, "←"), dom.el("kbd", {}, "→"), " step ", dom.el("kbd", {}, "space"), " play ",
          dom.el("kbd", {}, "home"), dom.el("kbd", {}, "end"))),
      dom.el("div.stage", {}, dom.el("div.telling", {}, what, where), text,
        dom.el("div.transport", {}, button("first", "First step", () => go(-1)), button("back", "Step back", () => go(at - 1)), play,
          button("next", "Step forward", () => go(at + 1)), button("last", "Last step", () => go(last)), slider,
          filters.select("Speed", SPEEDS, speed, (value) => { speed = value; }))),
      dom.el("ul.legend", { "aria-label": "What the styles mean" }, [...NAMES]
        .filter(([state]) => state === "new" || state === "mask" || used.has(state))
        .map(([state, word]) => dom.el("li", {}, dom.el(`span.pos.${state}`, { "aria-hidden": "true" }, state === "mask" || state === "planned" ? "·" : "text"), word))));

    function go(to, playing = false) {
      if (!playing) stop();
      at = Math.min(last, Math.max(-1, to));
      slider.value = String(at);
      slider.setAttribute("aria-valuetext", at < 0 ? "before the first step" : `step ${at + 1} of ${last + 1}`);
      if (!playing) router.note({ step: at === last ? null : at + 1 });
      paint();
    }

    function paint() {
      film.cellsAt(at, slotSize).forEach((cell, position) => {
        const span = spans[position];
        const fresh = cell.state === "fixed" && cell.step === at;
        const state = fresh && at < last ? "new" : cell.state;
        const [kind, shown] = [span.dataset.state, content(cell)];
        if (kind !== state) {
          span.classList.remove(kind);
          span.classList.add(state);
          span.dataset.state = state;
        }
        span.classList.toggle("settled", shown === span.dataset.room);
        if (span.firstChild.textContent !== shown) span.firstChild.textContent = shown;
        span.title = about(cell, position);
      });
      const step = film.steps[at];
      const [fixed, forwards] = step ? [step.fixed, step.forward + 1] : [0, 0];
      dom.replace(what, step ? step.sentence : "Nothing is decoded yet.");
      const call = step && film.forwards[step.forward];
      dom.replace(where, dom.el("span", {}, `step ${at + 1}/${last + 1}`),
        dom.el("span", {}, `forward ${forwards}/${film.forwards.length}`, call ? ` ${call[0]}: ${call[1]} rows, ${call[2]} cached` : ""),
        dom.el("span", {}, `${fixed} final${forwards ? `, ${format.number(fixed / forwards, 2)} a forward` : ""}`));
    }

    // What the pointer is told about a position.
    function about(cell, position) {
      const step = film.steps[cell.step];
      return [`position ${position + 1}${slotSize > 1 ? `, slot ${Math.floor(position / slotSize) + 1}` : ""}`,
        `${NAMES.get(cell.state)}${step && step.forward >= 0 ? ` in forward ${step.forward + 1}` : ""}`,
        cell.score !== null && `chosen with score ${format.number(cell.score, 3)}`,
        cell.text !== null && cell.state !== "fixed" && JSON.stringify(cell.text)].filter(Boolean).join("; ");
    }

    // A withheld text has states but no words: blocks stand for them.
    function content(cell) {
      if (cell.state === "mask" || cell.state === "planned") return "·";
      return cell.text === null ? "▪" : cell.text;
    }

    function stop() {
      clearTimeout(timer);
      timer = null;
      dom.replace(play, dom.icon(ICONS.play));
      play.setAttribute("aria-label", "Play");
      play.title = "Play";
      what.setAttribute("role", "status");
    }

    function toggle() {
      if (timer) {
        stop();
        return;
      }
      if (at >= last) go(-1);
      dom.replace(play, dom.icon(ICONS.pause));
      play.setAttribute("aria-label", "Pause");
      play.title = "Pause";
      what.removeAttribute("role"); // a screen reader would be told more than it can say
      const tick = () => {
        go(at + 1, true);
        if (at >= last) go(at);
        else timer = setTimeout(tick, DELAY / Number(speed));
      };
      timer = setTimeout(tick, DELAY / Number(speed));
    }

    function key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const within = (selector) => event.target instanceof Element && event.target.closest(selector);
      const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: -1, End: last };
      if (event.key === " " && !within(OWN_SPACE)) toggle();
      else if (event.key in moves && (event.target === slider || !within(OWN_ARROWS))) go(moves[event.key]);
      else return;
      event.preventDefault();
    }

    document.addEventListener("keydown", key);
    stop();
    // The first picture is the decoded text; playing begins at the first step all the same.
    go(asked !== null && Number.isInteger(Number(asked)) ? Number(asked) - 1 : last);
    return { node, close: () => {
      stop();
      document.removeEventListener("keydown", key);
    } };
  }

  return { create };
})();
