// Downloads: the conversation as JSON with all readings, activations as safetensors.
import { $, fill, h, notice, plural, set } from "./dom.js";
import { ask } from "./api.js";
import { allTexts, readings, settings, state } from "./state.js";

export function setUpExport() {
  const list = $("#export-list");
  const onkeydown = (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    document.activeElement[step]?.focus();
  };
  set(list, { onbeforetoggle: () => fill(list, items()), onclick: () => list.hidePopover(), onkeydown });
}

function items() {
  const n = captured().length;
  const item = (name, note, onclick, disabled) =>
    h("button", { role: "menuitem", disabled, autofocus: !disabled, onclick }, name, h("small", note));
  const texts = "texts, tokens, readings, rules, projections";
  const kept = n ? `${plural(n, "answer")} in one file` : "switch on “Keep activations” under Run";
  return [
    item("Conversation (JSON)", texts, saveConversation, !state.turns.length),
    item("Activations (safetensors)", kept, () => saveCaptures(captured()), !n),
  ];
}

function save(part, kind, name = "") {
  const stamp = new Date().toISOString().slice(0, 16).replace(/[-:]/g, "").replace("T", "-");
  const link = h("a", { href: URL.createObjectURL(new Blob([part])), download: `steerscope-${stamp}${name}.${kind}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// --- the conversation

/** The conversation with all readings, in names instead of numbers. */
export function conversation() {
  const used = new Set(
    allTexts().flatMap((run) => run.top.flatMap((_, i) => readings(run, i).map(([index]) => index))),
  );
  const { temperature, topP: top_p, maxTokens: max_tokens, seed, penalty: repetition_penalty } = settings;
  return {
    format: "steerscope-conversation-1",
    written: new Date().toISOString(),
    model: state.facts?.model ?? null,
    system: settings.system || null,
    sampling: { temperature, top_p, max_tokens, seed, repetition_penalty },
    concepts: state.concepts.filter((_, index) => used.has(index)).map(({ id, name, path }) => ({ id, name, path })),
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

function tokens(run) {
  const named = ([index, score]) => ({ id: state.concepts[index].id, score });
  return run.tokens.map((t, i) => ({ i, id: run.ids[i], t, top: readings(run, i).map(named) }));
}

function saveConversation() {
  save(JSON.stringify(conversation(), null, 1), "json");
}

// --- activations

/** Answers with activations, and the prefix of their tensors' names in a common file. */
const captured = () =>
  state.turns.flatMap((turn, k) =>
    turn.runs
      .filter((run) => run.capture)
      .map((run) => ({ run, prefix: `turn${k + 1}${run.side ? `.${run.side.toLowerCase()}` : ""}.` })),
  );

export const saveCapture = (run) => saveCaptures([{ run, prefix: "" }], `-${run.capture.id}`);

/** Download activations as one file. */
async function saveCaptures(wanted, name) {
  const parts = [];
  try {
    for (const { run, prefix } of wanted) {
      const answer = await ask(`v1/captures/${encodeURIComponent(run.capture.id)}`, { accept: [404, 410] });
      if (answer.ok) parts.push({ prefix, buffer: await answer.arrayBuffer() });
    }
  } catch (error) {
    return notice(error.message);
  }
  if (parts.length) save(join(parts), "safetensors", name);
  const lost = wanted.length - parts.length;
  if (lost && lost < wanted.length) notice(`${lost} of the answers’ activations were no longer on the server.`);
  else if (lost) notice("These activations are no longer on the server. Answer again to keep new ones.");
}

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
  return new Blob([new BigUint64Array([BigInt(padded.length)]), padded, ...bodies]);
}
