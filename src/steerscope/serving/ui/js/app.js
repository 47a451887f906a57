// The page as a whole: the message box, tabs, theme, keys, the height of the heat map.
import { $, clamp, fill, h, icon, set, work } from "./dom.js";
import { change, emit, keepConversation, on, restoreConversation, settings, state } from "./state.js";
import { connect } from "./connection.js";
import { send, stopAll } from "./runs.js";
import { setUpChat } from "./chat.js";
import { setUpExport } from "./exporting.js";
import { setUpHeat } from "./heat.js";
import { leave, setUpInspect } from "./inspect.js";
import { setUpRunning } from "./running.js";
import { setUpTint } from "./tint.js";
import { setUpVectors } from "./vectors.js";
import { setUpWatching } from "./watching.js";

const narrow = matchMedia("(max-width: 820px)");

/** What a button does, as its icon and title. */
function setButton(button, name, title) {
  fill(button, icon(name), h("span.sr", title));
  button.title = title;
}

// --- the message box

function setUpComposer() {
  const box = $("#prompt");
  const show = () => {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
    const writing = state.running > 0;
    setButton($("#send"), writing ? "stop" : "send", writing ? "Stop (Esc)" : "Send (Enter)");
    $("#send").disabled = !writing && (state.connection !== "ready" || !box.value.trim());
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) emit("again");
    else $("#composer").requestSubmit();
  };
  const onsubmit = (event) => {
    event.preventDefault();
    if (state.running) return stopAll();
    const text = box.value.trim();
    if (!text || state.connection !== "ready") return;
    box.value = "";
    send(text);
  };
  set(box, { oninput: show, onkeydown });
  set($("#composer"), { onsubmit });
  set($("#compare"), { checked: settings.compare, onchange: ({ target }) => change({ compare: target.checked }) });
  on("running connection", show);
  on("again", () => {
    const turn = state.turns.at(-1);
    if (turn && !state.running && state.connection === "ready") send(turn.user, { turn });
  });
  show();
  if (!narrow.matches) box.focus();
}

// --- the panel: it lies over the page on narrow screens

const tabs = [...document.querySelectorAll("#tabs [role=tab]")];

function chooseTab(name) {
  for (const tab of tabs) {
    const here = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", here);
    tab.tabIndex = here ? 0 : -1;
    $(`#tab-${tab.dataset.tab}`).hidden = !here;
  }
  change({ tab: name });
}

function setUpPanel() {
  const panel = $("#panel").classList;
  tabs.forEach((tab, i) => {
    const onkeydown = (event) => {
      const next = { ArrowRight: tabs[i + 1] ?? tabs[0], ArrowLeft: tabs.at(i - 1) }[event.key];
      next?.click();
      next?.focus();
    };
    set(tab, { onclick: () => chooseTab(tab.dataset.tab), onkeydown });
  });
  chooseTab(settings.tab);
  const open = (is) => {
    panel.toggle("open", is);
    $(is ? "#close-panel" : "#open-panel").focus();
  };
  set($("#open-panel"), { onclick: () => open(true) });
  set($("#close-panel"), { onclick: () => open(false) });
  on("pin", () => {
    if (!state.pinned) return;
    chooseTab("token");
    panel.toggle("open", narrow.matches);
  });
}

// --- theme

function setUpTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const { theme } = settings;
    document.documentElement.dataset.theme = theme;
    setButton($("#theme"), theme, `Theme: ${theme === "auto" ? "as the system" : theme}`);
  };
  const onclick = () => {
    const order = system.matches ? ["auto", "light", "dark"] : ["auto", "dark", "light"];
    change({ theme: order[(order.indexOf(settings.theme) + 1) % 3] }, "theme");
  };
  set($("#theme"), { onclick });
  on("theme", show);
  system.addEventListener("change", () => emit("theme"));
  show();
}

// --- the height of the heat map

function setUpSplitter() {
  const bar = $("#splitter");
  const dock = $("#dock");
  const take = (height) => {
    const fit = Math.round(clamp(height, 40, innerHeight * 0.7));
    dock.style.setProperty("--dock", `${fit}px`);
    bar.setAttribute("aria-valuenow", fit);
    change({ dock: fit });
  };
  if (settings.dock) take(settings.dock);
  else bar.setAttribute("aria-valuenow", dock.offsetHeight);
  set(bar, {
    onpointerdown: (event) => bar.setPointerCapture(event.pointerId),
    onpointermove: (event) => {
      if (bar.hasPointerCapture(event.pointerId)) take(dock.getBoundingClientRect().bottom - event.clientY);
    },
    onkeydown: (event) => {
      const step = { ArrowUp: 24, ArrowDown: -24 }[event.key];
      if (!step) return;
      event.preventDefault();
      take(dock.offsetHeight + step);
    },
  });
}

// --- keys

const KEYS = [
  ["Enter", "send; Shift+Enter is a new line"],
  ["Ctrl Enter", "answer the last message again with the current steering"],
  ["Esc", "stop the answer, close what is open"],
  ["/", "go to the message box"],
  ["← → ↑ ↓", "go through an answer’s tokens, or the heat map, when it has the focus"],
  ["Enter", "keep the token in the Token tab"],
  ["?", "this list"],
];

function help() {
  const keys = KEYS.flatMap(([key, what]) => [h("kbd", key), h("span", what)]);
  const close = h("button.plain", { onclick: () => dialog.close() }, "Close");
  const dialog = fill($("#dialog"), h("h2", "Keys"), h("div.keys", keys), close);
  if (!dialog.open) dialog.showModal();
}

function newConversation() {
  stopAll();
  Object.assign(state, { turns: [], shownTurn: null, pinned: null });
  emit("turns");
  emit("pin");
  keepConversation();
  $("#prompt").focus();
}

function setUpKeys() {
  const onkeydown = (event) => {
    const typing = event.target.matches?.("input, textarea, select");
    if (event.key === "Escape") {
      if ($("#panel").classList.contains("open")) $("#panel").classList.remove("open");
      else stopAll();
      leave();
    } else if (event.key === "?" && !typing) help();
    else if (event.key === "/" && !typing) {
      event.preventDefault();
      $("#prompt").focus();
    }
  };
  set(document, { onkeydown });
  set($("#help"), { onclick: help });
  set($("#new"), { onclick: newConversation });
}

await restoreConversation();
setUpTheme();
setUpComposer();
setUpPanel();
setUpSplitter();
setUpVectors();
setUpWatching();
setUpRunning();
setUpTint();
setUpChat();
setUpInspect();
setUpHeat();
setUpExport();
setUpKeys();
connect();
window.steerscope = { state, settings, work };
