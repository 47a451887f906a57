// The Run tab: sampling, the system message, and whether activations are kept.
import { $, fill, h } from "./dom.js";
import { change, on, settings, state } from "./state.js";
import { field, slider, toggle } from "./controls.js";

export function setUpRunning() {
  on("connection", show);
  show();
}

/** A slider of a setting; `least` makes it a whole number. */
function setting(key, name, range, title, least) {
  const set = (value) => change({ [key]: least === undefined ? value : Math.max(least, Math.round(value)) });
  return slider(name, range, settings[key], set, title);
}

/** What a text box of a setting needs. */
const written = (key) => ({ value: settings[key], onchange: ({ target }) => change({ [key]: target.value }) });

function show() {
  const about = { type: "text", placeholder: "all", "aria-label": "Layers to keep" };
  const layers = field("Layers", h("input", { ...about, ...written("captureLayers") }));
  const keep = (capture) => {
    layers.hidden = !capture;
    change({ capture });
  };
  layers.hidden = !settings.capture;
  const last = (state.facts?.layers ?? 1) - 1;
  const note = `Kept on the server for a while, with a download below each answer. Layers: 12, 10-14, or all (0–${last}).`;
  const system = h("textarea.area", { rows: 3, placeholder: "You are a helpful assistant.", ...written("system") });
  const form = h(
    "div.settings",
    setting("maxTokens", "Max tokens", [16, 2000, 4], "Largest number of tokens of an answer", 1),
    setting("temperature", "Temperature", [0, 2, 0.05], "0 always takes the most likely token"),
    setting("topP", "Top p", [0.05, 1, 0.05]),
    setting("penalty", "Repetition", [1, 1.5, 0.01], "Penalty on repeated tokens; 1 is none"),
    setting("seed", "Seed", [0, 100, 1], "Seed of sampling", 0),
    h("hr"),
    h("label.tall", "System message", system),
    h("hr"),
    toggle("Keep activations for export", settings.capture, keep),
    layers,
    h("p.note", note),
  );
  fill($("#tab-run"), form);
}
