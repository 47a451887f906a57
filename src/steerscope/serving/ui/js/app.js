// The page as a whole: the message box, tabs, theme, keys, the height of the heat map.
import { $, fill, h, icon, work } from "./dom.js";
import { change, emit, keepConversation, on, restoreConversation, settings, state } from "./state.js";
import { connect } from "./connection.js";
import { send, stopAll } from "./runs.js";
import { setUpChat } from "./chat.js";
import { setUpExport } from "./exporting.js";
import { setUpHeat } from "./heat.js";
import { leave, setUpInspect } from "./inspect.js";
import { setUpRunning } from "./running.js";
import { setUpTint } from "./tint.js";
import { setUpToken } from "./tokenview.js";
import { setUpVectors } from "./vectors.js";
import { setUpWatching } from "./watching.js";

const narrow = matchMedia("(max-width: 820px)");

// --- the message box

function setUpComposer() {
  const box = $("#prompt");
  const button = $("#send");
  const compare = $("#compare");
  const fit = () => {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  };
  const show = () => {
    const writing = state.running > 0;
    fill(button, icon(writing ? "stop" : "send"), h("span.sr", writing ? "Stop" : "Send"));
    button.title = writing ? "Stop (Esc)" : "Send (Enter)";
    button.disabled = !writing && (state.connection !== "ready" || !box.value.trim());
  };
  box.addEventListener("input", () => {
    fit();
    show();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) emit("again");
    else $("#composer").requestSubmit();
  });
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (state.running) return stopAll();
    const text = box.value.trim();
    if (!text || state.connection !== "ready") return;
    box.value = "";
    fit();
    send(text);
  });
  compare.checked = settings.compare;
  compare.addEventListener("change", () => change({ compare: compare.checked }));
  on("running connection", show);
  on("again", answerAgain);
  show();
  if (!narrow.matches) box.focus();
}

function answerAgain() {
  const turn = state.turns.at(-1);
  if (turn && !state.running && state.connection === "ready") send(turn.user, { turn });
}

// --- tabs and the panel

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

function setUpTabs() {
  for (const tab of tabs) {
    tab.id = `to-${tab.dataset.tab}`;
    tab.setAttribute("aria-controls", `tab-${tab.dataset.tab}`);
    $(`#tab-${tab.dataset.tab}`).setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", () => chooseTab(tab.dataset.tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
      chooseTab(next.dataset.tab);
      next.focus();
    });
  }
  chooseTab(tabs.some((tab) => tab.dataset.tab === settings.tab) ? settings.tab : "steer");
}

/** The panel lies over the page on narrow screens. */
function setUpPanel() {
  const panel = $("#panel");
  $("#open-panel").addEventListener("click", () => {
    panel.classList.add("open");
    $("#close-panel").focus();
  });
  $("#close-panel").addEventListener("click", () => {
    panel.classList.remove("open");
    $("#open-panel").focus();
  });
  on("pin", () => {
    if (!state.pinned) return;
    chooseTab("token");
    if (narrow.matches) panel.classList.add("open");
  });
}

// --- theme

function setUpTheme() {
  const button = $("#theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const names = { auto: "as the system", light: "light", dark: "dark" };
  let chosen = document.documentElement.dataset.theme ?? "auto";
  const show = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.title = `Theme: ${names[chosen]}`;
    fill(button, icon(chosen), h("span.sr", button.title));
    emit("theme");
  };
  button.addEventListener("click", () => {
    const order = ["auto", system.matches ? "light" : "dark", system.matches ? "dark" : "light"];
    chosen = order[(order.indexOf(chosen) + 1) % 3];
    try {
      localStorage.setItem("steerscope.theme", chosen);
    } catch {
      // Then it holds until the page is closed.
    }
    show();
  });
  system.addEventListener("change", () => emit("theme"));
  show();
}

// --- the height of the heat map

function setUpSplitter() {
  const bar = $("#splitter");
  const dock = $("#dock");
  const set = (height) => {
    const fit = Math.round(Math.max(40, Math.min(innerHeight * 0.7, height)));
    dock.style.setProperty("--dock", `${fit}px`);
    bar.setAttribute("aria-valuenow", fit);
    change({ dock: fit });
  };
  bar.setAttribute("aria-valuenow", dock.offsetHeight);
  if (settings.dock) set(settings.dock);
  bar.addEventListener("pointerdown", (event) => {
    bar.setPointerCapture(event.pointerId);
    const [from, tall] = [event.clientY, dock.offsetHeight];
    const move = (moved) => set(tall + from - moved.clientY);
    bar.addEventListener("pointermove", move);
    bar.addEventListener("pointerup", () => bar.removeEventListener("pointermove", move), { once: true });
  });
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowUp: 24, ArrowDown: -24 }[event.key];
    if (step) {
      event.preventDefault();
      set(dock.offsetHeight + step);
    }
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

function setUpKeys() {
  $("#help").addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, textarea, select");
    if (event.key === "Escape") {
      if ($("#panel").classList.contains("open")) $("#panel").classList.remove("open");
      else if (state.running) stopAll();
      leave();
    } else if (event.key === "?" && !typing) help();
    else if (event.key === "/" && !typing) {
      event.preventDefault();
      $("#prompt").focus();
    }
  });
  $("#new").addEventListener("click", () => {
    stopAll();
    Object.assign(state, { turns: [], shownTurn: null, pinned: null });
    emit("turns");
    emit("pin");
    keepConversation();
    $("#prompt").focus();
  });
}

await restoreConversation();
setUpTheme();
setUpComposer();
setUpTabs();
setUpPanel();
setUpSplitter();
setUpVectors();
setUpWatching();
setUpRunning();
setUpTint();
setUpChat();
setUpInspect();
setUpHeat();
setUpToken();
setUpExport();
setUpKeys();
connect();
window.steerscope = { state, settings, work };
