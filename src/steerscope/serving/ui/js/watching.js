// The Watch tab: the lens pack that reads answers, and rules on its readings.
import { $, clamp, fill, h, iconButton } from "./dom.js";
import { get } from "./api.js";
import { change, chosenPack, concept, conceptById, conceptItems, emit, on, settings, state } from "./state.js";
import { choose, combo, field, slider } from "./controls.js";

let body;
const draft = { concept: null, above: 0.6, forTokens: 1, action: "flag", vector: null, scale: 0.5 };

export function setUpWatching() {
  body = $("#tab-watch");
  on("lenses vectors connection rules", show);
  show();
}

export async function loadLenses() {
  state.lenses = (await get("v1/lenses")).data;
  await pickPack(chosenPack()?.name ?? state.lenses[0]?.name);
}

/** Load all concepts of a pack in the order of its hierarchy, so that they can be chosen before their first reading. */
async function pickPack(name) {
  change({ pack: name || null });
  if (name) {
    const pack = await get(`v1/lenses/${encodeURIComponent(name)}`);
    pack.concepts.sort((a, b) => compare(a.path, b.path));
    pack.concepts.forEach((node, order) => {
      state.concepts[concept(node.id, node.name, node.path)].order = order;
    });
  }
  emit("lenses");
}

/** Children follow their parents. */
function compare(a, b) {
  const i = a.findIndex((step, k) => step !== b[k]);
  if (i < 0) return a.length - b.length;
  return i < b.length && a[i] < b[i] ? -1 : 1;
}

const names = (list) => Object.fromEntries(list.map(({ name }) => [name, name]));

function show() {
  if (!state.lenses.length) {
    const missing =
      "No lens pack is loaded. Train one with “steerscope lens fit” and start the server with --pack PACK.";
    fill(body, h("p.lead", state.connection === "ready" ? missing : "Waiting for the server."));
    return;
  }
  const pack = chosenPack();
  const packs = { ...names(state.lenses), "": "none: do not watch" };
  const setTop = (topK) => change({ topK: clamp(Math.round(topK), 1, 256) });
  fill(
    body,
    h("p.lead", "Lenses read each token’s activations. Rules act on the readings while the answer is written."),
    h(
      "div.settings",
      field("Pack", choose("Lens pack", packs, settings.pack ?? "", pickPack)),
      pack && h("div.hint", [`layer ${pack.layer}`, `${pack.count} lenses`, pack.model].filter(Boolean).join(" · ")),
      slider("Top concepts", [1, 64, 1], settings.topK, setTop, "Number of concepts per token"),
    ),
    h("h2", "Rules"),
    settings.rules.map(ruleView),
    !settings.rules.length && h("p.note", "None yet. A rule can mark a token, end the answer, or switch a vector on."),
    ruleForm(),
  );
}

// --- rules

const ACTIONS = { flag: "mark the token", stop: "end the answer" };

function ruleView(rule) {
  const { when, then } = rule;
  const name = conceptById(when.concept)?.name ?? when.concept;
  const op = then.steering?.ops?.[0];
  const what = op ? `${then.kind} with ${op.vector} ${op.scale}` : ACTIONS[then.kind];
  const lasting = when.for_tokens > 1 ? ` for ${when.for_tokens} tokens` : "";
  const remove = () => change({ rules: settings.rules.filter((other) => other !== rule) }, "rules");
  return h(
    "div.rule",
    h("div", h("b", then.name), h("small", `${name} above ${when.above}${lasting}: ${what}`)),
    iconButton("close", `Remove the rule ${then.name}`, remove),
  );
}

const set = (key) => (value) => {
  draft[key] = value;
};

function ruleForm() {
  const box = h("div.combo");
  const pick = (id) => {
    draft.concept = id;
    showConcept(conceptById(id).name);
  };
  const about = { label: "Concept of the rule", placeholder: "Choose a concept" };
  const showConcept = combo(box, { ...about, items: conceptItems, pick });
  showConcept(conceptById(draft.concept)?.name ?? "");
  const steer = h("div.stack", steerFields());
  const actions = state.vectors.length ? { ...ACTIONS, steer: "switch a vector on" } : ACTIONS;
  const setAction = (action) => {
    draft.action = action;
    fill(steer, steerFields());
  };
  return h(
    "form.make",
    { onsubmit: add },
    field("When", box),
    slider("Above", [0, 1, 0.01], draft.above, set("above")),
    slider("For tokens", [1, 12, 1], draft.forTokens, (n) => set("forTokens")(Math.max(1, Math.round(n)))),
    field("Then", choose("What the rule does", actions, draft.action, setAction)),
    steer,
    h("button.plain", { type: "submit" }, "Add the rule"),
  );
}

/** The vector that a steering rule switches on. */
function steerFields() {
  if (draft.action !== "steer") return [];
  draft.vector ??= state.vectors[0]?.name ?? null;
  return [
    field("Vector", choose("Vector of the rule", names(state.vectors), draft.vector, set("vector"))),
    slider("Strength", [-2, 2, 0.05], draft.scale, set("scale")),
  ];
}

function add(event) {
  event.preventDefault();
  const one = conceptById(draft.concept);
  if (!one) return $("input", event.target).focus();
  const base = one.name.toLowerCase();
  let name = base;
  for (let i = 2; settings.rules.some((rule) => rule.then.name === name); i += 1) name = `${base} ${i}`;
  const then = { kind: draft.action, name };
  if (draft.action === "steer") then.steering = { ops: [{ op: "add", vector: draft.vector, scale: draft.scale }] };
  const when = { kind: "when", concept: one.id, above: draft.above, for_tokens: draft.forTokens };
  draft.concept = null;
  change({ rules: [...settings.rules, { when, then }] }, "rules");
}
