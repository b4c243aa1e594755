// Names the views and shows the one that the address asks for.
const isBoard = store.index.kind === "leaderboard";
Object.assign(router.views, isBoard ? { "": board.view, point: board.point }
  : { "": overview.view, task: task.view, sample: sample.view, pair: pair.view });
document.querySelector("header.bar").append(theme.button());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
router.start().then(() => {
  document.documentElement.setAttribute("data-ready", "");
  performance.mark("shown");
});
