// The Token tab: everything about the pinned token. plotly.js is only loaded when its chart is first needed.
import { $, colour, fill, h, shown } from "./dom.js";
import { on, settings, state } from "./state.js";
import { conceptRow, concepts, why } from "./inspect.js";
import { tintByConcept } from "./tint.js";

let plotly = null;
function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const script = h("script", {
      src: new URL("ui/plotly.min.js", document.baseURI).href,
      onload: () => resolve(window.Plotly),
      onerror: () => {
        plotly = null;
        reject(new Error("The server has no plotly.js: pip install plotly"));
      },
    });
    document.head.append(script);
  });
  return plotly;
}

export function setUpToken() {
  on("pin turns run-end tint theme", show);
  show();
}

const HELP =
  "Click a token, or press Enter on it, to keep it here: all its concepts, and its projection on each vector, " +
  "layer by layer.";

function show() {
  const body = $("#tab-token");
  if (!state.pinned) {
    fill(body, h("p.lead", HELP));
    return;
  }
  const { run, i } = state.pinned;
  const found = concepts(run, i, 64);
  const facts = [
    ["token", i],
    ["id", run.ids[i] ?? "–"],
    ["position", run.prompt === null ? "–" : run.prompt + i],
    ["answer", run.message ? "your message" : (run.side ?? "–")],
  ];
  const pairs = facts.flatMap(([name, value]) => [h("dt", name), h("dd", `${value}`)]);
  const fired = run.firings.filter((one) => one.at === i);
  const measured = Object.keys(run.projections).length > 0;
  const chart = h("div.plot", { role: "img", "aria-label": "Projection by layer" });
  const missing =
    run.status === "writing" ? "Measured when the answer ends." : "No vector was measured in this answer.";
  fill(
    body,
    h("div.token-head", h("span.word", shown(run.tokens[i])), h("dl.pairs", pairs)),
    fired.map((one) => h("p.server-note", `The rule “${one.name}” fired here (${one.action}).`)),
    h("div.section-head", h("h2", "Concepts")),
    found.length ? h("ul.found.full", found.map(row)) : h("p.note", why(run, i)),
    h("div.section-head", h("h2", "Projection by layer")),
    measured ? chart : h("p.note", missing),
  );
  if (measured) draw(chart, run, i);
}

function row(one) {
  const chosen = settings.tint.kind === "concept" && settings.tint.id === one.id;
  const act = { title: "Tint tokens by this concept", onclick: () => tintByConcept(one.id) };
  return h(`li${chosen ? ".chosen" : ""}`, h("button", act, conceptRow(one)));
}

async function draw(chart, run, i) {
  let drawing;
  try {
    drawing = await loadPlotly();
  } catch (error) {
    fill(chart, h("p.note", error.message));
    return;
  }
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
