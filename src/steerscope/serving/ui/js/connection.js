// The state of the server: loading, ready, gone, or asking for a key. Tries again by itself.
import { $, fill, h, hush, notice } from "./dom.js";
import { ask, get, Refused, setKey, Unreachable } from "./api.js";
import { emit, on, state } from "./state.js";
import { loadVectors } from "./vectors.js";
import { loadLenses } from "./watching.js";

const NAMES = { starting: "Loading", ready: "Ready", offline: "Disconnected", locked: "Key needed", failed: "Failed" };
const LOOK_MS = 15_000;
const LOADING_MS = 1_000;
let timer = 0;
let wait = 1000;

export function connect() {
  on("lost", () => {
    if (state.connection === "ready") look();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && state.connection !== "locked") look();
  });
  look();
}

function become(next) {
  const before = state.connection;
  state.connection = next;
  const status = $("#status");
  status.dataset.state = next;
  $("span", status).textContent = NAMES[next];
  if (before !== next) emit("connection");
}

async function look() {
  clearTimeout(timer);
  try {
    timer = setTimeout(look, await visit());
  } catch (error) {
    if (error.status === 401) return askKey();
    if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
    become("offline");
    const lost = "The server cannot be reached. Your conversation is kept here; trying again.";
    const action = { name: "Try now", act: look };
    notice(error instanceof Unreachable ? lost : error.message, { action, stays: true });
    timer = setTimeout(look, wait);
    wait = Math.min(wait * 1.6, LOOK_MS);
  }
}

/** Ask the server how it is; return the milliseconds until the next time. */
async function visit() {
  // /health answers 200 while the model loads; /ready would fill the browser's console with errors.
  const answer = await ask("health", { accept: [503] });
  const { stage } = await answer.json();
  if (stage !== "ready") {
    become(answer.ok ? "starting" : "failed");
    if (answer.ok) notice(`The server is getting ready: ${stage}`, { kind: "info", progress: true, stays: true });
    else notice(`The server ${stage}`, { stays: true });
    return LOADING_MS;
  }
  wait = 1000;
  if (state.connection !== "ready") await load();
  return LOOK_MS;
}

async function load() {
  const facts = await get("v1/capabilities");
  state.facts = facts;
  const about = ` · ${facts.layers} layers · ${facts.hidden} wide · ${facts.engine} engine`;
  fill($("#model"), h("b", facts.model), h("span", about));
  document.title = `${facts.model} · steerscope`;
  const [steer] = await Promise.all([get("v1/steering"), loadVectors(), loadLenses()]);
  state.serverSteering = steer.ops;
  hush();
  become("ready");
}

function askKey() {
  become("locked");
  hush();
  const about = { type: "password", autocomplete: "current-password", "aria-label": "API key", required: true };
  const input = h("input", about);
  const onsubmit = () => {
    setKey(input.value.trim());
    look();
  };
  const dialog = fill(
    $("#dialog"),
    h("h2", "This server needs a key"),
    h("p", "The key it was started with (--api-key). It stays in this tab."),
    h("form", { method: "dialog", onsubmit }, input, h("button.plain.main", { type: "submit" }, "Connect")),
  );
  if (!dialog.open) dialog.showModal();
  input.focus();
}
