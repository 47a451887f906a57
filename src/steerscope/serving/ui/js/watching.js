// The Watch tab: the lens pack that reads answers, and rules on its readings.
import { $, fill, h, iconButton } from "./dom.js";
import { get } from "./api.js";
import { change, concept, conceptById, conceptItems, emit, on, settings, state } from "./state.js";
import { choose, field, slider } from "./controls.js";
import { Combo } from "./combo.js";

let body;
const draft = { concept: null, above: 0.6, forTokens: 1, action: "flag", vector: null, scale: 0.5 };

export function setUpWatching() {
  body = $("#tab-watch");
  on("lenses vectors connection rules", show);
  show();
}

export async function loadLenses() {
  state.lenses = (await get("v1/lenses")).data;
  if (!state.lenses.some((one) => one.name === settings.pack)) change({ pack: state.lenses[0]?.name ?? null });
  await loadTree();
  emit("lenses");
}

/** Load all concepts in the order of the hierarchy, so that they can be chosen before their first reading. */
async function loadTree() {
  if (!settings.pack) return;
  const pack = await get(`v1/lenses/${encodeURIComponent(settings.pack)}`);
  const tree = [...pack.concepts].sort((a, b) => compare(a.path, b.path));
  tree.forEach((node, order) => {
    state.concepts[concept(node.id, node.name, node.path)].order = order;
  });
  emit("concepts");
}

/** Children follow their parents. */
function compare(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i += 1) if (a[i] !== b[i]) return a[i] < b[i] ? -1 : 1;
  return a.length - b.length;
}

function show() {
  if (!state.lenses.length) {
    const missing =
      "No lens pack is loaded. Train one with “steerscope lens fit” and start the server with --pack PACK.";
    fill(body, h("p.lead", state.connection === "ready" ? missing : "Waiting for the server."));
    return;
  }
  const pack = state.lenses.find((one) => one.name === settings.pack);
  const packs = [...state.lenses.map((one) => [one.name, one.name]), ["", "none: do not watch"]];
  const setTop = (topK) => change({ topK: Math.max(1, Math.min(256, Math.round(topK))) });
  fill(
    body,
    h("p.lead", "Lenses read each token’s activations. Rules act on the readings while the answer is written."),
    h(
      "div.settings",
      field("Pack", choose("Lens pack", packs, settings.pack ?? "", pickPack)),
      pack && h("div.hint", [`layer ${pack.layer}`, `${pack.count} lenses`, pack.model].filter(Boolean).join(" · ")),
      slider("Top concepts", [1, 64, 1], settings.topK, setTop, { title: "Number of concepts per token" }),
    ),
    h("div.section-head", h("h2", "Rules")),
    settings.rules.map(ruleView),
    !settings.rules.length && h("p.note", "None yet. A rule can mark a token, end the answer, or switch a vector on."),
    ruleForm(),
  );
}

async function pickPack(name) {
  change({ pack: name || null });
  await loadTree();
  emit("lenses");
}

// --- rules

const ACTIONS = { flag: "mark it", stop: "end the answer", steer: "steer" };

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
    combo.show(conceptById(id).name);
  };
  const label = "Concept of the rule";
  const combo = new Combo(box, { label, placeholder: "Choose a concept", items: conceptItems, pick });
  combo.show(conceptById(draft.concept)?.name ?? "");
  const steer = h("div.stack", steerFields());
  const actions = [
    ["flag", "mark the token"],
    ["stop", "end the answer"],
  ];
  if (state.vectors.length) actions.push(["steer", "switch a vector on"]);
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
  const vectors = state.vectors.map((one) => [one.name, one.name]);
  return [
    field("Vector", choose("Vector of the rule", vectors, draft.vector, set("vector"))),
    slider("Strength", [-2, 2, 0.05], draft.scale, set("scale"), { signed: true }),
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
