// Pointing at tokens by mouse, touch or keyboard: the card with a token's readings, and the Token tab, where one is kept.
// plotly.js is only loaded when the chart of the tab is first needed.
import { $, clamp, colour, fill, h, say, set, shown, signed, svg } from "./dom.js";
import { allTexts, emit, on, readings, settings, state } from "./state.js";
import { spanOf, view } from "./chat.js";
import { tintByConcept } from "./tint.js";

const LINGER_MS = 120; // the card stays open over the gap between two words
let card;
let leaving = 0;
let current = null; // {run, i}
const runOf = (id) => allTexts().find((run) => run.id === id);

export function setUpInspect() {
  card = $("#card");
  set($("#log"), {
    onpointerover: (event) => {
      if (event.pointerType === "touch") return;
      clearTimeout(leaving);
      const found = tokenAt(event.target);
      if (found) point(found.run, found.i);
      else leaving = setTimeout(leave, LINGER_MS);
    },
    onpointerleave: leave,
    onscroll: leave,
    onclick: ({ target }) => {
      const chip = target.closest(".fire");
      const found = chip ? nextOf(chip) : tokenAt(target);
      if (found && !String(getSelection())) pin(found.run, found.i);
    },
    onkeydown: key,
    onfocusout: leave,
  });
  addEventListener("resize", leave);
  on("turns", leave);
  on("pin", () => {
    for (const old of document.querySelectorAll(".t.pinned")) old.classList.remove("pinned");
    if (state.pinned) spanOf(state.pinned.run, state.pinned.i)?.classList.add("pinned");
  });
  on("pin turns run-end tint theme", showTab);
  showTab();
}

function tokenAt(target) {
  if (target.at === undefined || !target.classList.contains("t")) return null;
  const run = runOf(target.closest(".tokens").dataset.run);
  return run && { run, i: target.at };
}

/** The next token where the rule of a chip fired. */
function nextOf(chip) {
  const i = chip.ats[chip.next % chip.ats.length];
  chip.next += 1;
  return { run: runOf(chip.closest(".answer").dataset.run), i };
}

/** Show a token's card, and its column in the heat map. */
function point(run, i) {
  if (current?.run === run && current.i === i) return;
  leave();
  current = { run, i };
  const span = spanOf(run, i);
  span.classList.add("at");
  fillCard(run, i);
  place(span.getClientRects()[0]);
  emit("point", current);
}

export function leave() {
  clearTimeout(leaving);
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

function key(event) {
  const tokens = event.target.closest(".tokens");
  const run = tokens && runOf(tokens.dataset.run);
  if (!run?.tokens.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const here = current?.run === run ? current.i : -1;
  const to = {
    ArrowRight: () => here + 1,
    ArrowLeft: () => here - 1,
    Home: () => 0,
    End: () => run.tokens.length - 1,
    ArrowDown: () => above(run, Math.max(here, 0), 1),
    ArrowUp: () => above(run, Math.max(here, 0), -1),
  }[event.key];
  if (to) {
    event.preventDefault();
    const i = clamp(to(), 0, run.tokens.length - 1);
    spanOf(run, i)?.scrollIntoView({ block: "nearest" });
    point(run, i);
    const said = readings(run, i).slice(0, 3);
    const names = said.map(([index, score]) => `${state.concepts[index].name} ${score.toFixed(2)}`).join(", ");
    say(`${run.tokens[i].trim() || shown(run.tokens[i])}: ${names || "no reading"}`);
  } else if ((event.key === "Enter" || event.key === " ") && here >= 0) {
    event.preventDefault();
    pin(run, here);
  }
}

/** The token nearest above (step −1) or below (step 1) in the text. */
function above(run, i, step) {
  const boxes = view(run).spans.map((span) => span.getBoundingClientRect());
  const down = ({ top }) => (top - boxes[i].top) * step;
  const beyond = boxes.filter((box) => down(box) >= 6);
  const next = Math.min(...beyond.map(down));
  const away = ({ left }) => Math.abs(left - boxes[i].left);
  const [best] = beyond.filter((box) => down(box) <= next + 6).sort((a, b) => away(a) - away(b));
  return best ? boxes.indexOf(best) : i;
}

// --- the card

/** A concept's name with its path, and its score. */
function conceptRow([index, score]) {
  const { name, path } = state.concepts[index];
  const parents = path.slice(0, -1).join(" › ");
  const meter = h("span.meter", { "--v": clamp(score, 0, 1).toFixed(3) }, h("i"));
  return [h("span", h("b", name), parents && h("small", parents)), meter, h("span.num", score.toFixed(2))];
}

/** Why a token has no readings. */
function why(run, i) {
  if (i >= run.tokens.length - 1 && run.status !== "writing" && run.finish)
    return "The last token is never fed back to the model, so it has no reading.";
  if (!settings.pack && !run.top.length) return "No lens pack was reading this answer.";
  if (run.message && !run.top.length) return "Where rules act, only the answer is read.";
  return run.status === "writing" ? "Read with the next token." : "No concept stood out here.";
}

const firedAt = (run, i) => run.firings.filter((one) => one.at === i);

function fillCard(run, i) {
  const rows = readings(run, i).slice(0, 5);
  const fired = firedAt(run, i).map((one) => h("div.note", `⚑ ${one.name}: ${one.action}`));
  const sparks = Object.entries(run.projections).map(([name, layers]) => spark(name, layers, i));
  const title = h("div.note", "Projection from the first to the last layer");
  const number = `token ${i}${run.ids[i] === null ? "" : ` · id ${run.ids[i]}`}`;
  fill(
    card,
    h("div.card-head", h("span.word", shown(run.tokens[i])), h("span", number)),
    rows.length ? h("ul.found", ...rows.map((one) => h("li", conceptRow(one)))) : h("p.note", why(run, i)),
    fired,
    sparks.some(Boolean) && h("div.sparks", title, sparks),
  );
  card.hidden = false;
}

/** A token's projections on one vector over its layers. */
function spark(name, layers, i) {
  const points = Object.entries(layers).filter(([, values]) => Number.isFinite(values[i])); // numbers are in order
  if (!points.length) return null;
  const [wide, tall] = [130, 24];
  const values = points.map(([, values]) => values[i]);
  const low = Math.min(0, ...values);
  const size = Math.max(0, ...values) - low || 1;
  const y = (value) => (3 + (1 - (value - low) / size) * (tall - 6)).toFixed(1);
  const x = (k) => (points.length === 1 ? wide / 2 : 3 + (k / (points.length - 1)) * (wide - 6)).toFixed(1);
  const line = values.map((value, k) => `${k ? "L" : "M"}${x(k)} ${y(value)}`).join("");
  const axis = svg("path", { d: `M0 ${y(0)}H${wide}`, class: "axis" });
  const drawing = svg("svg", { viewBox: `0 0 ${wide} ${tall}` }, axis, svg("path", { d: line }));
  const title = `layers ${points[0][0]}–${points.at(-1)[0]}`;
  return h("div.spark", { title }, h("span", name), drawing, h("span.num", signed(values.at(-1))));
}

function place(box) {
  if (!box) {
    card.hidden = true;
    return;
  }
  const { offsetWidth: wide, offsetHeight: tall } = card;
  const below = box.bottom + 8 + tall < innerHeight;
  card.style.left = `${clamp(box.left + box.width / 2 - wide / 2, 8, innerWidth - wide - 8)}px`;
  card.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - tall - 8)}px`;
}

// --- the Token tab

const HELP =
  "Click a token, or press Enter on it, to keep it here: all its concepts, and its projection on each vector, " +
  "layer by layer.";

function showTab() {
  const body = $("#tab-token");
  if (!state.pinned) {
    fill(body, h("p.lead", HELP));
    return;
  }
  const { run, i } = state.pinned;
  const found = readings(run, i);
  const facts = {
    token: i,
    id: run.ids[i] ?? "–",
    position: run.prompt === null ? "–" : run.prompt + i,
    answer: run.message ? "your message" : (run.side ?? "–"),
  };
  const pairs = Object.entries(facts).flatMap(([name, value]) => [h("dt", name), h("dd", `${value}`)]);
  const measured = Object.keys(run.projections).length > 0;
  const chart = h("div.plot", { role: "img", "aria-label": "Projection by layer" });
  const missing =
    run.status === "writing" ? "Measured when the answer ends." : "No vector was measured in this answer.";
  fill(
    body,
    h("div.token-head", h("span.word", shown(run.tokens[i])), h("dl.pairs", pairs)),
    firedAt(run, i).map((one) => h("p.server-note", `The rule “${one.name}” fired here (${one.action}).`)),
    h("h2", "Concepts"),
    found.length ? h("ul.found.full", found.map(tabRow)) : h("p.note", why(run, i)),
    h("h2", "Projection by layer"),
    measured ? chart : h("p.note", missing),
  );
  if (measured) draw(chart, run, i).catch((error) => fill(chart, h("p.note", error.message)));
}

function tabRow(one) {
  const { id } = state.concepts[one[0]];
  const chosen = settings.tint.kind === "concept" && settings.tint.id === id;
  const act = { title: "Tint tokens by this concept", onclick: () => tintByConcept(id) };
  return h(`li${chosen ? ".chosen" : ""}`, h("button", act, conceptRow(one)));
}

let plotly = null;
function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const src = new URL("ui/plotly.min.js", document.baseURI).href;
    const onerror = () => {
      plotly = null;
      reject(new Error("The server has no plotly.js: pip install plotly"));
    };
    document.head.append(h("script", { src, onload: () => resolve(window.Plotly), onerror }));
  });
  return plotly;
}

async function draw(chart, run, i) {
  const drawing = await loadPlotly();
  if (!chart.isConnected) return;
  const lines = ["accent", "heat", "cool", "mark", "good"].map((name) => colour(`--${name}`));
  const traces = Object.entries(run.projections).map(([name, layers], k) => ({
    name,
    x: Object.keys(layers).map(Number), // integer keys are in order
    y: Object.values(layers).map((values) => values[i] ?? null),
    mode: "lines+markers",
    line: { width: 1.8, color: lines[k % lines.length] },
    marker: { size: 5 },
    hovertemplate: `${name.replace(/[<>&]/g, "")}, layer %{x}: %{y:.2f}<extra></extra>`,
  }));
  drawing.react(chart, traces, layout(traces), { displayModeBar: false, responsive: true });
}

function layout(traces) {
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--soft") };
  const grid = { gridcolor: colour("--line"), zerolinecolor: colour("--line-strong") };
  const axis = { ...grid, tickfont: { size: 11 }, fixedrange: true };
  const title = { text: "layer", standoff: 6, font: { size: 11 } };
  const label = { color: colour("--ink"), size: 12 };
  return {
    margin: { l: 40, r: 10, t: 8, b: 34 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    height: 230,
    font,
    xaxis: { ...axis, title, dtick: traces[0].x.length > 14 ? 5 : 1, zeroline: false },
    yaxis: axis,
    legend: { orientation: "h", y: 1.14, x: 0 },
    showlegend: traces.length > 1,
    hovermode: "closest",
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line-strong"), font: label },
  };
}
