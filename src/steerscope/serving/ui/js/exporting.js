// Downloads: the conversation as JSON with all readings, activations as safetensors.
import { $, fill, h } from "./dom.js";
import { ask } from "./api.js";
import { settings, state } from "./state.js";
import { notice } from "./notice.js";

export function setUpExport() {
  const menu = $("#export");
  const button = $("button", menu);
  const list = $(".menu-list", menu);
  const open = (shown) => {
    list.hidden = !shown;
    button.setAttribute("aria-expanded", shown);
  };
  list.addEventListener("click", () => open(false));
  button.addEventListener("click", () => {
    if (!list.hidden) return open(false);
    fill(list, items());
    open(true);
    $("button:not(:disabled)", list)?.focus();
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      open(false);
      button.focus();
    }
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) {
      event.preventDefault();
      document.activeElement[step]?.focus();
    }
  });
  document.addEventListener("pointerdown", (event) => {
    if (!menu.contains(event.target)) open(false);
  });
}

function items() {
  const item = (name, note, onclick, disabled) =>
    h("button", { role: "menuitem", disabled, onclick }, name, h("small", note));
  const n = captured().length;
  const texts = "texts, tokens, readings, rules, projections";
  const kept = n ? `${n} ${n === 1 ? "answer" : "answers"} in one file` : "switch on “Keep activations” under Run";
  return [
    item("Conversation (JSON)", texts, saveConversation, !state.turns.length),
    item("Activations (safetensors)", kept, saveCaptures, !n),
  ];
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const stamp = () => new Date().toISOString().slice(0, 16).replace(/[-:]/g, "").replace("T", "-");

/** Answers with activations, and the prefix of their tensors' names in a common file. */
const captured = () =>
  state.turns.flatMap((turn, k) =>
    turn.runs
      .filter((run) => run.capture)
      .map((run) => ({ run, prefix: `turn${k + 1}${run.side ? `.${run.side.toLowerCase()}` : ""}.` })),
  );

// --- the conversation

/** The conversation with all readings, in names instead of numbers. */
export function conversation() {
  const read = state.turns.flatMap((turn) => turn.runs.flatMap((run) => [...run.top, ...(run.said?.top ?? [])]));
  const used = new Set(read.flatMap((top) => (top ?? []).filter((_, j) => j % 2 === 0)));
  const { temperature, topP: top_p, maxTokens: max_tokens, seed, penalty: repetition_penalty } = settings;
  return {
    format: "steerscope-conversation-1",
    written: new Date().toISOString(),
    model: state.facts?.model ?? null,
    system: settings.system || null,
    sampling: { temperature, top_p, max_tokens, seed, repetition_penalty },
    concepts: [...used]
      .sort((a, b) => a - b)
      .map((index) => state.concepts[index])
      .map(({ id, name, path }) => ({ id, name, path })),
    turns: state.turns.map(({ user, chosen, runs }) => ({ user, chosen, answers: runs.map(answer) })),
  };
}

function answer(run) {
  const { side, text, steer, finish, status, error, usage, said, projections } = run;
  return {
    ...{ side, text, steer, finish, status, error, usage },
    prompt_tokens: run.prompt,
    message: said && { position: said.prompt, tokens: tokens(said), projections: said.projections },
    tokens: tokens(run),
    rules: run.firings,
    projections,
    captures: run.capture,
  };
}

const tokens = (run) => run.tokens.map((t, i) => ({ i, id: run.ids[i], t, top: named(run.top[i] ?? []) }));

const named = (top) =>
  Array.from({ length: top.length / 2 }, (_, j) => ({ id: state.concepts[top[2 * j]].id, score: top[2 * j + 1] }));

function saveConversation() {
  save(new Blob([JSON.stringify(conversation(), null, 1)], { type: "application/json" }), `steerscope-${stamp()}.json`);
}

// --- activations

async function fetched(run) {
  return (await ask(`v1/captures/${encodeURIComponent(run.capture.id)}`)).arrayBuffer();
}

export async function saveCapture(run) {
  try {
    save(new Blob([await fetched(run)]), `steerscope-${stamp()}-${run.capture.id}.safetensors`);
  } catch (error) {
    notice(gone(error));
  }
}

async function saveCaptures() {
  const parts = [];
  let lost = 0;
  for (const { run, prefix } of captured()) {
    try {
      parts.push({ prefix, buffer: await fetched(run) });
    } catch (error) {
      if (error.status !== 404 && error.status !== 410) return notice(gone(error));
      lost += 1;
    }
  }
  if (parts.length) save(join(parts), `steerscope-${stamp()}.safetensors`);
  if (lost) notice(`${lost} of the answers’ activations were no longer on the server.`);
}
const gone = (error) =>
  error.status === 404 || error.status === 410
    ? "These activations are no longer on the server. Answer again to keep new ones."
    : error.message;

/** Join safetensors files (an 8-byte length, a JSON header, then the tensors' bytes): [{prefix, buffer}] → Blob. */
function join(parts) {
  const header = {};
  const notes = {};
  const bodies = [];
  let at = 0;
  for (const { prefix, buffer } of parts) {
    const size = Number(new DataView(buffer).getBigUint64(0, true));
    const { __metadata__: told = {}, ...tensors } = JSON.parse(
      new TextDecoder().decode(new Uint8Array(buffer, 8, size)),
    );
    for (const [name, tensor] of Object.entries(tensors)) {
      const [from, to] = tensor.data_offsets;
      header[`${prefix}${name}`] = { ...tensor, data_offsets: [from + at, to + at] };
    }
    for (const [name, text] of Object.entries(told)) notes[`${prefix}${name}`] = text;
    bodies.push(new Uint8Array(buffer, 8 + size));
    at += buffer.byteLength - 8 - size;
  }
  const text = new TextEncoder().encode(JSON.stringify({ __metadata__: notes, ...header }));
  const padded = new Uint8Array(Math.ceil(text.length / 8) * 8).fill(32); // tensors stay aligned
  padded.set(text);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(padded.length), true);
  return new Blob([length, padded, ...bodies], { type: "application/octet-stream" });
}
