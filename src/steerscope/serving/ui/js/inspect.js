// Pointing at tokens by mouse, touch or keyboard: the card with a token's readings, and pinning a token.
import { $, fill, h, say, shown, signed, svg } from "./dom.js";
import { emit, on, settings, state } from "./state.js";
import { spanOf, view } from "./chat.js";

const LINGER_MS = 120; // the card stays open over the gap between two words
let card,
  leaving = 0,
  current = null; // {run, i}
const runOf = (id) =>
  state.turns.flatMap((turn) => turn.runs.flatMap((run) => [run, run.said])).find((run) => run?.id === id);

export function setUpInspect() {
  card = $("#card");
  const log = $("#log");
  log.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    const found = tokenAt(event.target);
    clearTimeout(leaving);
    if (found) point(found.run, found.i);
    else leaving = setTimeout(leave, LINGER_MS);
  });
  log.addEventListener("pointerleave", () => {
    clearTimeout(leaving);
    leave();
  });
  log.addEventListener(
    "scroll",
    () => {
      if (current) leave();
    },
    { passive: true },
  );
  log.addEventListener("click", (event) => {
    const chip = event.target.closest(".fire");
    const found = chip
      ? { run: runOf(chip.closest(".answer").dataset.run), i: chip.ats[chip.next++ % chip.ats.length] }
      : tokenAt(event.target);
    if (found && !String(getSelection())) pin(found.run, found.i);
  });
  log.addEventListener("keydown", key);
  log.addEventListener("focusout", (event) => {
    if (event.target.closest(".tokens")) leave();
  });
  addEventListener("resize", leave);
  on("turns", leave);
  on("pin", mark);
}

function tokenAt(target) {
  if (target.at === undefined || !target.classList.contains("t")) return null;
  const run = runOf(target.closest(".tokens").dataset.run);
  return run && { run, i: target.at };
}

/** Show a token's card, and its column in the heat map. */
export function point(run, i, anchor = null) {
  if (current?.run === run && current.i === i) return;
  leave();
  current = { run, i };
  const span = spanOf(run, i);
  span?.classList.add("at");
  fillCard(run, i);
  place(anchor ?? span?.getClientRects()[0]);
  emit("point", current);
}

export function leave() {
  if (!current) return;
  spanOf(current.run, current.i)?.classList.remove("at");
  current = null;
  card.hidden = true;
  emit("point", null);
}

export function pin(run, i) {
  state.pinned = { run, i };
  const made = view(run);
  if (made) {
    state.shownTurn = made.turn === state.turns.at(-1) ? null : made.turn;
    spanOf(run, i)?.scrollIntoView({ block: "nearest" });
  }
  emit("pin");
}

function mark() {
  for (const old of document.querySelectorAll(".t.pinned")) old.classList.remove("pinned");
  if (state.pinned) spanOf(state.pinned.run, state.pinned.i)?.classList.add("pinned");
}

function key(event) {
  const tokens = event.target.closest?.(".tokens");
  if (!tokens || event.ctrlKey || event.metaKey || event.altKey) return;
  const run = runOf(tokens.dataset.run);
  const n = run?.tokens.length ?? 0;
  if (!n) return;
  const here = current?.run === run ? current.i : -1;
  const line = (step) => above(run, Math.max(here, 0), step);
  const to = {
    ArrowRight: () => here + 1,
    ArrowLeft: () => here - 1,
    Home: () => 0,
    End: () => n - 1,
    ArrowDown: () => line(1),
    ArrowUp: () => line(-1),
  }[event.key];
  if (to) {
    event.preventDefault();
    const i = Math.max(0, Math.min(n - 1, to()));
    spanOf(run, i)?.scrollIntoView({ block: "nearest" });
    point(run, i);
    say(spoken(run, i));
  } else if ((event.key === "Enter" || event.key === " ") && here >= 0) {
    event.preventDefault();
    pin(run, here);
  }
}

/** The token nearest above or below in the text. */
function above(run, i, step) {
  const from = spanOf(run, i).getBoundingClientRect();
  let best = i,
    distance = Infinity,
    lineTop = null;
  for (let j = i + step; j >= 0 && j < run.tokens.length; j += step) {
    const box = spanOf(run, j).getBoundingClientRect();
    if ((box.top - from.top) * step < 6) continue;
    lineTop ??= box.top;
    if (Math.abs(box.top - lineTop) > 6) break;
    const away = Math.abs(box.left - from.left);
    if (away < distance) [best, distance] = [j, away];
  }
  return best;
}

function spoken(run, i) {
  const top = run.top[i] ?? [];
  const said = [];
  for (let j = 0; j < Math.min(top.length, 6); j += 2)
    said.push(`${state.concepts[top[j]].name} ${top[j + 1].toFixed(2)}`);
  return `${run.tokens[i].trim() || shown(run.tokens[i])}: ${said.join(", ") || "no reading"}`;
}

// --- the card

export function concepts(run, i, most) {
  const top = run.top[i] ?? [];
  const list = [];
  for (let j = 0; j < top.length && list.length < most; j += 2)
    list.push({ ...state.concepts[top[j]], index: top[j], score: top[j + 1] });
  return list;
}

export function why(run, i) {
  if (i >= run.tokens.length - 1 && run.status !== "writing" && run.finish)
    return "The last token is never fed back to the model, so it has no reading.";
  if (!settings.pack && !run.top.length) return "No lens pack was reading this answer.";
  if (run.message && !run.top.length) return "Where rules act, only the answer is read.";
  return run.status === "writing" ? "Read with the next token." : "No concept stood out here.";
}

/** A concept's name with its path, and its score. */
export function conceptRow(one) {
  const path = one.path.slice(0, -1).join(" › ");
  const meter = h("span.meter", { "--v": Math.max(0, Math.min(1, one.score)).toFixed(3) }, h("i"));
  const name = h("span", h("b", one.name), path && h("small", path));
  return [name, meter, h("span.num", one.score.toFixed(2))];
}

function fillCard(run, i) {
  const rows = concepts(run, i, 5).map((one) => h("li", conceptRow(one)));
  const fired = run.firings.filter((one) => one.at === i).map((one) => h("div.note", `⚑ ${one.name}: ${one.action}`));
  const sparks = Object.entries(run.projections).map(([name, layers]) => spark(name, layers, i));
  const title = h("div.note", "Projection from the first to the last layer");
  fill(
    card,
    h(
      "div.card-head",
      h("span.word", shown(run.tokens[i])),
      h("span", `token ${i}${run.ids[i] === null ? "" : ` · id ${run.ids[i]}`}`),
    ),
    rows.length ? h("ul.found", rows) : h("p.note", why(run, i)),
    fired,
    sparks.some(Boolean) && h("div.sparks", title, sparks),
  );
  card.hidden = false;
}

/** A token's projections on one vector over its layers. */
function spark(name, layers, i) {
  const points = Object.entries(layers)
    .map(([layer, values]) => [Number(layer), values[i]])
    .filter(([, value]) => Number.isFinite(value))
    .sort((a, b) => a[0] - b[0]);
  if (!points.length) return null;
  const [wide, tall] = [130, 24];
  const values = points.map(([, value]) => value);
  const low = Math.min(0, ...values);
  const size = Math.max(0, ...values) - low || 1;
  const y = (value) => (3 + (1 - (value - low) / size) * (tall - 6)).toFixed(1);
  const x = (k) => (points.length === 1 ? wide / 2 : 3 + (k / (points.length - 1)) * (wide - 6)).toFixed(1);
  const line = values.map((value, k) => `${k ? "L" : "M"}${x(k)} ${y(value)}`).join("");
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${wide} ${tall}` },
    svg("path", { d: `M0 ${y(0)}H${wide}`, class: "axis" }),
    svg("path", { d: line }),
  );
  const [last, value] = points.at(-1);
  const title = `layers ${points[0][0]}–${last}`;
  return h("div.spark", { title }, h("span", name), drawing, h("span.num", signed(value)));
}

function place(box) {
  if (!box) {
    card.hidden = true;
    return;
  }
  const { offsetWidth: wide, offsetHeight: tall } = card;
  const left = Math.max(8, Math.min(innerWidth - wide - 8, box.left + box.width / 2 - wide / 2));
  const below = box.bottom + 8 + tall < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - tall - 8)}px`;
}
