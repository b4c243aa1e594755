// What the page holds: the index, read at once, and chunks, unpacked when something in them is shown.
const store = (() => {
  const index = JSON.parse(document.getElementById("index").textContent);
  const MOST_UNPACKED = 24;
  const unpacked = new Map();

  // The chunks follow this script, so that the first view does not wait for them.
  const arrived = new Promise((resolve) => {
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve, { once: true });
    else resolve();
  });

  async function unpack(name) {
    await arrived;
    const packed = Uint8Array.from(atob(document.getElementById(name).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // The entries of a chunk; the ones used longest ago are forgotten.
  function chunk(name) {
    const found = unpacked.get(name) || unpack(name);
    unpacked.delete(name);
    unpacked.set(name, found);
    if (unpacked.size > MOST_UNPACKED) unpacked.delete(unpacked.keys().next().value);
    return found;
  }

  async function entry([name, number]) {
    return (await chunk(name))[number];
  }

  // The columns of a task's list: itemId, number, state, ... and where bodies and questions lie.
  async function list(cell) {
    return cell.list === null ? null : (await chunk(cell.list))[0];
  }

  // Shortened questions and right answers of a task, by number.
  async function questions(cell) {
    const name = index.questions[cell.task];
    return name ? (await chunk(name))[0] : { question: [], gold: [] };
  }

  // What was asked and what came out, of every sample of a cell, in small letters. Kept, because readers search again.
  const searched = new Map();
  function texts(cell) {
    if (!searched.has(cell.number)) searched.set(cell.number, read(cell));
    return searched.get(cell.number);
  }

  async function read(cell) {
    const { bodies, asked } = await list(cell);
    const place = (row) => Number(bodies[row][0].slice(1));
    const rows = [...bodies.keys()].sort((one, other) => place(one) - place(other)); // so that a chunk is unpacked once
    const found = [];
    for (const row of rows) {
      const [body, { prompt }] = [await entry(bodies[row]), await entry(asked[row])];
      found[row] = [prompt, body.output, body.error].filter(Boolean).join("\n").toLowerCase();
    }
    return found;
  }

  const cells = index.cells.map((cell, number) => ({ ...cell, number, about: index.runs[cell.run] }));
  const runs = new Map();
  for (const { system, run } of cells) runs.set(system, new Set(runs.get(system)).add(run));

  // A system's name, with the run's where several runs share it.
  const systemName = ({ system, about }) => (runs.get(system).size > 1 ? `${system} (${about.id})` : system);

  // What tells apart the cells of one run and task that were decoded under several settings; empty if there is one.
  function variant(cell) {
    const beside = cells.filter((one) => one.run === cell.run && one.task === cell.task && one.mini === cell.mini);
    if (beside.length < 2) return "";
    const names = Object.keys(cell.settings).filter((name) =>
      beside.some((one) => one.settings[name] !== cell.settings[name]));
    const parts = names.map((name) => `${name}=${cell.settings[name]}`);
    if (beside.some((one) => one.version !== cell.version)) parts.unshift(`version ${cell.version}`);
    return parts.join(", ");
  }

  const title = (cell) => [systemName(cell), variant(cell)].filter(Boolean).join(" · ");

  return { index, cells, entry, list, questions, texts, systemName, variant, title };
})();
