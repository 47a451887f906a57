// The Run tab: how answers are sampled, and whether activations are kept.
import { $, h } from "./dom.js";
import { change, on, settings, state } from "./state.js";
import { slider, toggle } from "./controls.js";

export function setUpRunning() {
  on("connection", show);
  show();
}

function show() {
  const set = (name) => (value) => change({ [name]: value });
  const whole = (name, least) => (value) => change({ [name]: Math.max(least, Math.round(value)) });
  const layers = h("input", {
    type: "text",
    value: settings.captureLayers,
    placeholder: "all",
    "aria-label": "Layers to keep",
    onchange: () => change({ captureLayers: layers.value }),
  });
  const layerRow = h("div.field.wide", { hidden: !settings.capture }, h("span", {}, "Layers"), layers);
  const system = h("textarea.area", {
    rows: 3,
    placeholder: "You are a helpful assistant.",
    onchange: () => change({ system: system.value }),
  });
  system.value = settings.system;
  const last = (state.facts?.layers ?? 1) - 1;
  $("#tab-run").replaceChildren(
    h(
      "div.settings",
      {},
      slider({
        name: "Max tokens",
        min: 16,
        max: 2000,
        step: 4,
        value: settings.maxTokens,
        title: "Most tokens of an answer",
        change: whole("maxTokens", 1),
      }),
      slider({
        name: "Temperature",
        min: 0,
        max: 2,
        step: 0.05,
        value: settings.temperature,
        title: "0 always takes the likeliest token",
        change: set("temperature"),
      }),
      slider({ name: "Top p", min: 0.05, max: 1, step: 0.05, value: settings.topP, change: set("topP") }),
      slider({
        name: "Repetition",
        min: 1,
        max: 1.5,
        step: 0.01,
        value: settings.penalty,
        title: "Penalty on what was said before: 1 is none",
        change: set("penalty"),
      }),
      slider({ name: "Seed", min: 0, max: 100, step: 1, value: settings.seed, change: whole("seed", 0) }),
      h("hr"),
      h("label.tall", {}, "System message", system),
      h("hr"),
      toggle({
        name: "Keep activations for export",
        value: settings.capture,
        change: (capture) => {
          layerRow.hidden = !capture;
          change({ capture });
        },
      }),
      layerRow,
      h(
        "p.note",
        {},
        `Kept on the server for a while, and offered below each answer. Layers: 12, 10-14, or all (0–${last}).`,
      ),
    ),
  );
}
