// What stands where a conversation will be.
import { h } from "./dom.js";
import { state } from "./state.js";
import { send } from "./runs.js";

const TRIES = [
  "How was your day?",
  "Tell me a story about a lighthouse in a storm.",
  "What should I cook on a cold evening?",
];

export function blank() {
  const ready = state.connection === "ready";
  const missing = [];
  if (ready && !state.lenses.length)
    missing.push("No lens pack is loaded, so concepts cannot be read: start the server with --pack PACK.");
  if (ready && !state.vectors.length)
    missing.push("There are no vectors yet: drop a file on the panel, or start the server with --vectors DIR.");
  return h(
    "div.blank",
    {},
    h("h2", {}, "Watch a model think, and steer it"),
    h(
      "p",
      {},
      "Every token of the answer is coloured by what lenses read in the model while it was written. " +
        "Point at a token for all of it; move a slider and ask again to see what changes.",
    ),
    missing.map((text) => h("p.server-note", {}, text)),
    h(
      "div.tries",
      {},
      TRIES.map((text) => h("button", { type: "button", disabled: !ready, onclick: () => send(text) }, text)),
    ),
  );
}
