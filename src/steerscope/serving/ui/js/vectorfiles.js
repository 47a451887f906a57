// Vectors of the server: listing, sending and deleting them.
import { $ } from "./dom.js";
import { ask, get } from "./api.js";
import { change, emit, settings, state } from "./state.js";

export async function loadVectors() {
  state.vectors = (await get("v1/vectors")).data;
  emit("vectors");
}

const note = (text) => {
  $("#vector-note").textContent = text;
};

export async function upload(files) {
  for (const file of files) {
    note(`Sending ${file.name}`);
    try {
      await ask(`v1/vectors?name=${encodeURIComponent(file.name.replace(/\.[^.]+$/, ""))}`, {
        method: "POST",
        body: file,
      });
      await loadVectors();
      note(`${file.name} is there.`);
    } catch (error) {
      note(`${file.name}: ${error.message}`);
    }
  }
}

export async function remove(vector) {
  if (!confirm(`Delete ${vector.name} from the server?`)) return;
  try {
    await ask(`v1/vectors/${encodeURIComponent(vector.name)}`, { method: "DELETE" });
    const { [vector.name]: _, ...steer } = settings.steer;
    change({ steer });
    await loadVectors();
  } catch (error) {
    note(error.message);
  }
}
