// Taking things home: the conversation as JSON with all that was read, activations as safetensors.
import { $, h } from "./dom.js";
import { ask } from "./api.js";
import { settings, state } from "./state.js";
import { join } from "./safetensors.js";
import { notice } from "./notice.js";

export function setUpExport() {
  const menu = $("#export"),
    button = $("button", menu),
    list = $(".menu-list", menu);
  const close = () => {
    list.hidden = true;
    button.setAttribute("aria-expanded", "false");
  };
  button.addEventListener("click", () => {
    if (!list.hidden) return close();
    const kept = captured();
    const item = (name, note, act, off) =>
      h(
        "button",
        {
          type: "button",
          role: "menuitem",
          disabled: off,
          onclick: () => {
            close();
            act();
          },
        },
        name,
        h("small", {}, note),
      );
    list.replaceChildren(
      item("Conversation (JSON)", "texts, tokens, readings, rules, projections", saveConversation, !state.turns.length),
      item(
        "Activations (safetensors)",
        kept.length
          ? `${kept.length} ${kept.length === 1 ? "answer" : "answers"} in one file`
          : "switch on “Keep activations” under Run",
        saveCaptures,
        !kept.length,
      ),
    );
    list.hidden = false;
    button.setAttribute("aria-expanded", "true");
    $("button:not(:disabled)", list)?.focus();
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      close();
      button.focus();
    }
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) {
      event.preventDefault();
      document.activeElement[step]?.focus();
    }
  });
  document.addEventListener("pointerdown", (event) => {
    if (!menu.contains(event.target)) close();
  });
}

function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
const stamp = () => new Date().toISOString().slice(0, 16).replace(/[-:]/g, "").replace("T", "-");

const captured = () =>
  state.turns.flatMap((turn, k) =>
    turn.runs
      .filter((run) => run.capture)
      .map((run) => ({ run, prefix: `turn${k + 1}${run.side ? `.${run.side.toLowerCase()}` : ""}.` })),
  );

/** Everything that was asked and read, in names instead of numbers. */
export function conversation() {
  const named = (top) =>
    top?.length
      ? Array.from({ length: top.length / 2 }, (_, j) => ({ id: state.concepts[top[2 * j]].id, score: top[2 * j + 1] }))
      : [];
  const read = state.turns.flatMap((turn) => turn.runs.flatMap((run) => [...run.top, ...(run.said?.top ?? [])]));
  const used = new Set(read.flatMap((top) => (top ?? []).filter((_, j) => j % 2 === 0)));
  const tokens = (run) => run.tokens.map((text, i) => ({ i, id: run.ids[i], t: text, top: named(run.top[i]) }));
  return {
    format: "steerscope-conversation-1",
    written: new Date().toISOString(),
    model: state.facts?.model ?? null,
    system: settings.system || null,
    sampling: {
      temperature: settings.temperature,
      top_p: settings.topP,
      max_tokens: settings.maxTokens,
      seed: settings.seed,
      repetition_penalty: settings.penalty,
    },
    concepts: [...used]
      .sort((a, b) => a - b)
      .map((index) => ({
        id: state.concepts[index].id,
        name: state.concepts[index].name,
        path: state.concepts[index].path,
      })),
    turns: state.turns.map((turn) => ({
      user: turn.user,
      chosen: turn.chosen,
      answers: turn.runs.map((run) => ({
        side: run.side,
        text: run.text,
        steer: run.steer,
        finish: run.finish,
        status: run.status,
        error: run.error,
        usage: run.usage,
        prompt_tokens: run.prompt,
        message: run.said && { position: run.said.prompt, tokens: tokens(run.said), projections: run.said.projections },
        tokens: tokens(run),
        rules: run.firings,
        projections: run.projections,
        captures: run.capture,
      })),
    })),
  };
}

export function saveConversation() {
  save(new Blob([JSON.stringify(conversation(), null, 1)], { type: "application/json" }), `steerscope-${stamp()}.json`);
}

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
