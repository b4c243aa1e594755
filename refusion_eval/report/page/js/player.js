// A replay's state: what every position looks like after a step. The steps come ready made; here they are only applied.
const player = (() => {
  const MASK = "mask";

  // One step as the record holds it: [action, forward, [[state, positions, texts]], candidates, [[position, score]], reason].
  function read([action, forward, changes, candidates, scores, reason]) {
    return { action, forward, changes, candidates, scores, reason };
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

    function counts(last) {
      let fixed = 0;
      for (let number = 0; number <= last; number += 1) fixed += total(steps[number], "fixed");
      return { fixed, forwards: last < 0 ? 0 : steps[last].forward + 1 };
    }

    return { steps, finals, cellsAt, counts, forwards: record.forwards, positions: record.positions, kept: record.kept };
  }

  const total = (step, state) => step.changes.reduce((sum, [name, positions]) => sum + (name === state ? positions.length : 0), 0);

  // What a step did, in a sentence.
  function sentence(step) {
    const tokens = (number) => format.count(number, "token");
    const [fixed, rejected, drafts] = ["fixed", "rejected", "draft"].map((state) => total(step, state));
    const gone = rejected ? `, rejected ${format.count(rejected, "draft")}` : "";
    const sorted = step.scores.map(([, score]) => score).filter((score) => score !== null).sort((a, b) => b - a);
    const range = sorted.length === 0 ? "" : sorted.length === 1 ? ` (score ${format.number(sorted[0], 3)})`
      : ` (scores ${format.number(sorted[sorted.length - 1], 3)} to ${format.number(sorted[0], 3)})`;
    switch (step.action) {
      case "plan": return `Planned ${step.scores.length} of ${format.count(step.candidates, "slot")}${range}.`;
      case "draft": return `Drafted ${tokens(drafts)}${gone}.`;
      case "fix": return `${step.candidates ? `Fixed ${fixed} of ${step.candidates} candidates` : `Accepted ${tokens(fixed)}`}${gone}${range}.`;
      case "stop": return `Stopped: ${({ eos: "end of sequence", length: "length reached", stop_string: "stop string" })[step.reason] || step.reason}.`;
      default: return "Nothing became final in this forward.";
    }
  }

  return { create, sentence };
})();
