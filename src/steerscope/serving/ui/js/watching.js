// The Watch tab: the lens pack that reads answers, and rules on what it reads.
import { $, h, iconButton } from "./dom.js";
import { get } from "./api.js";
import { change, concept, emit, inTree, on, settings, state } from "./state.js";
import { choose, slider } from "./controls.js";
import { Combo } from "./combo.js";

let body;
let draft = { concept: null, above: 0.6, forTokens: 1, action: "flag", vector: null, scale: 0.5 };

export function setUpWatching() {
  body = $("#tab-watch");
  on("lenses vectors connection rules", show);
  show();
}

export async function loadLenses() {
  const found = await get("v1/lenses");
  state.lenses = found.data;
  if (!state.lenses.some((one) => one.name === settings.pack)) change({ pack: state.lenses[0]?.name ?? null });
  await loadTree();
  emit("lenses");
}

/** All concepts in the order of the hierarchy, so that they can be chosen before they were ever read. */
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
    body.replaceChildren(
      h(
        "p.lead",
        {},
        state.connection === "ready"
          ? "No lens pack is loaded. Train one with “steerscope lens fit” and start the server with --pack PACK."
          : "Waiting for the server.",
      ),
    );
    return;
  }
  const pack = state.lenses.find((one) => one.name === settings.pack);
  body.replaceChildren(
    h("p.lead", {}, "Lenses read each token’s activations. Rules act on what they read, while the answer is written."),
    h(
      "div.settings",
      {},
      h(
        "div.field.wide",
        {},
        h("span", {}, "Pack"),
        choose({
          label: "Lens pack",
          options: [...state.lenses.map((one) => [one.name, one.name]), ["", "none: do not watch"]],
          value: settings.pack ?? "",
          change: pickPack,
        }),
      ),
      pack
        ? h("div.hint", {}, [`layer ${pack.layer}`, `${pack.count} lenses`, pack.model].filter(Boolean).join(" · "))
        : null,
      slider({
        name: "Top concepts",
        min: 1,
        max: 64,
        step: 1,
        value: settings.topK,
        title: "How many concepts of each token are told",
        change: (topK) => change({ topK: Math.max(1, Math.min(256, Math.round(topK))) }),
      }),
    ),
    h("div.section-head", {}, h("h2", {}, "Rules")),
    ...settings.rules.map(ruleView),
    ...(settings.rules.length
      ? []
      : [h("p.note", {}, "None yet. A rule can mark a token, end the answer, or switch a vector on.")]),
    maker(),
  );
}

async function pickPack(name) {
  change({ pack: name || null });
  await loadTree();
  emit("lenses");
}

const ACTS = { flag: "mark it", stop: "end the answer", steer: "steer" };

function ruleView(rule) {
  const { when, then } = rule;
  const one = state.concepts.find((other) => other.id === when.concept);
  const op = then.steering?.ops?.[0];
  const what = op ? `${then.kind} with ${op.vector} ${op.scale}` : ACTS[then.kind];
  const lasting = when.for_tokens > 1 ? ` for ${when.for_tokens} tokens` : "";
  const remove = () => change({ rules: settings.rules.filter((other) => other !== rule) }, "rules");
  return h(
    "div.rule",
    {},
    h(
      "div",
      {},
      h("b", {}, then.name),
      h("small", {}, `${one?.name ?? when.concept} above ${when.above}${lasting}: ${what}`),
    ),
    iconButton("close", `Remove the rule ${then.name}`, remove),
  );
}

function maker() {
  const box = h("div.combo");
  const combo = new Combo(box, {
    label: "Concept of the rule",
    placeholder: "Choose a concept",
    items: () =>
      inTree().map((one) => ({ value: one.id, label: one.name, depth: one.depth, find: one.path.join(" ") })),
    pick: (id) => {
      draft.concept = id;
      combo.show(state.concepts.find((one) => one.id === id).name);
    },
  });
  const named = state.concepts.find((one) => one.id === draft.concept);
  combo.show(named?.name ?? "");
  const steer = h("div.stack");
  const showSteer = () => {
    draft.vector ??= state.vectors[0]?.name ?? null;
    const fields =
      draft.action !== "steer"
        ? []
        : [
            h(
              "div.field.wide",
              {},
              h("span", {}, "Vector"),
              choose({
                label: "Vector of the rule",
                options: state.vectors.map((one) => [one.name, one.name]),
                value: draft.vector,
                change: (vector) => {
                  draft.vector = vector;
                },
              }),
            ),
            slider({
              name: "Strength",
              min: -2,
              max: 2,
              step: 0.05,
              value: draft.scale,
              signed: true,
              change: (scale) => {
                draft.scale = scale;
              },
            }),
          ];
    steer.replaceChildren(...fields);
  };
  showSteer();
  const actions = [
    ["flag", "mark the token"],
    ["stop", "end the answer"],
    ...(state.vectors.length ? [["steer", "switch a vector on"]] : []),
  ];
  return h(
    "form.make",
    { onsubmit: add },
    h("div.field.wide", {}, h("span", {}, "When"), box),
    slider({
      name: "Above",
      min: 0,
      max: 1,
      step: 0.01,
      value: draft.above,
      change: (above) => {
        draft.above = above;
      },
    }),
    slider({
      name: "For tokens",
      min: 1,
      max: 12,
      step: 1,
      value: draft.forTokens,
      change: (n) => {
        draft.forTokens = Math.max(1, Math.round(n));
      },
    }),
    h(
      "div.field.wide",
      {},
      h("span", {}, "Then"),
      choose({
        label: "What the rule does",
        options: actions,
        value: draft.action,
        change: (action) => {
          draft.action = action;
          showSteer();
        },
      }),
    ),
    steer,
    h("button.plain", { type: "submit" }, "Add the rule"),
  );
}

function add(event) {
  event.preventDefault();
  const one = state.concepts.find((other) => other.id === draft.concept);
  if (!one) return $("input", event.target).focus();
  const base = one.name.toLowerCase();
  let name = base;
  for (let i = 2; settings.rules.some((rule) => rule.then.name === name); i += 1) name = `${base} ${i}`;
  const then = { kind: draft.action, name };
  if (draft.action === "steer") then.steering = { ops: [{ op: "add", vector: draft.vector, scale: draft.scale }] };
  const when = { kind: "when", concept: one.id, above: draft.above, for_tokens: draft.forTokens };
  draft = { ...draft, concept: null };
  change({ rules: [...settings.rules, { when, then }] }, "rules");
}
