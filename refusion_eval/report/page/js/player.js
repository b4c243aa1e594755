// A replay's state: what every position looks like after a step. The steps come ready made; here they are only applied.
const player = (() => {
  const MASK = "mask";

  // One step as the record holds it; `fixed` counts the positions that are final after it.
  function read([action, forward, changes, scores, sentence, fixed]) {
    return { action, forward, changes, scores, sentence, fixed };
  }

  function create(record) {
    const steps = record.steps.map(read);
    // The text that each position ends with; undefined where it never becomes final.
    const finals = [];
    for (const { changes } of steps) {
      for (const [state, positions, texts] of changes) {
        if (state === "fixed" && texts.length) positions.forEach((position, place) => { finals[position] = record.pieces[texts[place]]; });
      }
    }

    // state, text (null if none), the step that gave them, and the last score of its choice, of every position after step
    // `last`; -1 is the beginning. A slot is chosen by the score of its first position.
    function cellsAt(last, slotSize) {
      const cells = Array.from({ length: record.positions }, () => ({ state: MASK, text: null, step: -1, score: null }));
      let rejected = [];
      for (let number = 0; number <= last; number += 1) {
        for (const cell of rejected) {
          if (cell.state === "rejected") Object.assign(cell, { state: MASK, text: null });
        }
        rejected = [];
        for (const [first, score] of steps[number].scores) {
          const end = steps[number].action === "plan" ? first + slotSize : first + 1;
          for (const cell of cells.slice(first, end)) cell.score = score;
        }
        for (const [state, positions, texts] of steps[number].changes) {
          positions.forEach((position, place) => {
            const cell = cells[position];
            cell.state = state;
            cell.step = number;
            if (texts.length) cell.text = record.pieces[texts[place]];
            if (state === "rejected") rejected.push(cell);
          });
        }
      }
      return cells;
    }

    return { steps, finals, cellsAt, forwards: record.forwards, positions: record.positions, kept: record.kept };
  }

  return { create };
})();
