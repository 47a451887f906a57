// Whether the server is there: loading, ready, gone, or asking for a key. Tries again by itself.
import { $, h } from "./dom.js";
import { ask, get, Refused, setKey, Unreachable } from "./api.js";
import { emit, on, state } from "./state.js";
import { hush, notice } from "./notice.js";
import { loadVectors } from "./vectorfiles.js";
import { loadLenses } from "./watching.js";

const TOLD = { starting: "Loading", ready: "Ready", offline: "Disconnected", locked: "Key needed", failed: "Failed" };
const LOOK_MS = 15_000,
  MOST_WAIT_MS = 15_000;
let timer = 0,
  wait = 1000;

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
  $("span", status).textContent = TOLD[next];
  if (before !== next) emit("connection");
}

async function look() {
  clearTimeout(timer);
  try {
    // /health answers 200 while the model loads; /ready would fill the browser's console with errors.
    const answer = await ask("health", { accept: [503] });
    const told = await answer.json();
    if (told.stage !== "ready") {
      become(answer.ok ? "starting" : "failed");
      const what = answer.ok ? `The server is getting ready: ${told.stage}` : `The server ${told.stage}`;
      notice(what, {
        kind: answer.ok ? "info" : "bad",
        progress: answer.ok ? (told.progress ?? -1) : null,
        stays: true,
      });
      timer = setTimeout(look, 1000);
      return;
    }
    wait = 1000;
    if (state.connection !== "ready") await load();
    timer = setTimeout(look, LOOK_MS);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) return askKey();
    if (!(error instanceof Unreachable) && !(error instanceof Refused)) throw error;
    become("offline");
    const what =
      error instanceof Unreachable
        ? "The server cannot be reached. Your conversation is kept here; trying again."
        : error.message;
    notice(what, { action: { name: "Try now", act: look }, stays: true });
    timer = setTimeout(look, wait);
    wait = Math.min(wait * 1.6, MOST_WAIT_MS);
  }
}

async function load() {
  const facts = await get("v1/capabilities");
  state.facts = facts;
  const parts = [
    facts.layers && `${facts.layers} layers`,
    facts.hidden && `${facts.hidden} wide`,
    facts.engine && `${facts.engine} engine`,
  ].filter(Boolean);
  $("#model").replaceChildren(
    h("b", {}, facts.model ?? ""),
    h("span", {}, parts.length ? ` · ${parts.join(" · ")}` : ""),
  );
  document.title = `${facts.model ?? "steerscope"} · steerscope`;
  const [steer] = await Promise.all([get("v1/steering"), loadVectors(), loadLenses()]);
  state.serverSteering = steer.ops;
  hush();
  become("ready");
}

function askKey() {
  become("locked");
  hush();
  const input = h("input", {
    type: "password",
    autocomplete: "current-password",
    "aria-label": "API key",
    required: true,
  });
  const dialog = $("#dialog");
  const form = h(
    "form",
    {
      method: "dialog",
      onsubmit: () => {
        setKey(input.value.trim());
        look();
      },
    },
    input,
    h("button.plain.main", { type: "submit" }, "Connect"),
  );
  dialog.replaceChildren(
    h("h2", {}, "This server asks for a key"),
    h("p", {}, "The one it was started with (--api-key). It stays in this tab."),
    form,
  );
  if (!dialog.open) dialog.showModal();
  input.focus();
}
