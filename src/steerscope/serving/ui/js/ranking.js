// The rows of the heat map: which concepts, in which order. Sums grow with the text; the order changes rarely, so that
// rows do not jump while one reads them.
import { settings, state } from "./state.js";

const MOST_ROWS = 200; // of packs with thousands of concepts, the strongest

export class Ranking {
  constructor(turn) {
    this.turn = turn;
    this.sums = new Map(); // concept → sum of its scores
    this.counted = turn.runs.map(() => 0);
    this.rows = [];
    this.place = new Map(); // concept → row
    this.sortAt = 4;
  }

  /** Take in what was read since the last time; true when rows changed. */
  count() {
    let fresh = false;
    this.turn.runs.forEach((run, k) => {
      for (; this.counted[k] < run.top.length; this.counted[k] += 1) {
        const top = run.top[this.counted[k]] ?? [];
        for (let j = 0; j < top.length; j += 2) {
          if (!this.sums.has(top[j])) fresh = true;
          this.sums.set(top[j], (this.sums.get(top[j]) ?? 0) + top[j + 1]);
        }
      }
    });
    const n = Math.max(...this.counted);
    if ((fresh && this.rows.length < MOST_ROWS) || n >= this.sortAt) {
      while (n >= this.sortAt) this.sortAt *= 2;
      this.sort();
      return true;
    }
    return false;
  }

  settle() {
    this.count();
    this.sort();
  }

  sort() {
    const strongest = [...this.sums.keys()].sort((a, b) => this.sums.get(b) - this.sums.get(a)).slice(0, MOST_ROWS);
    const byTree = (a, b) => state.concepts[a].order - state.concepts[b].order;
    this.rows = settings.order === "tree" ? strongest.sort(byTree) : strongest;
    this.place = new Map(this.rows.map((index, row) => [index, row]));
  }
}
