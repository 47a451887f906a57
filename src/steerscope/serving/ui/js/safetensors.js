// Several safetensors files as one: an 8-byte length, a JSON header, then the bytes of all tensors.

/** parts: [{prefix, buffer}] → Blob; names become prefix + name. */
export function join(parts) {
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
