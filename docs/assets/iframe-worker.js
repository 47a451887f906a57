// Pages opened from the disk may not start workers: there the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source === this.inside) this.deliver(event.data);
      });
      this.ready = new Promise((resolve) => {
        this.inside.started = resolve;
      });
      const page = frame.contentDocument;
      page.open();
      page.write(
        "<script>postMessage = (data) => parent.postMessage(data, '*');" +
          "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {" +
          "const script = document.createElement('script'); script.src = url; script.onload = done;" +
          "script.onerror = failed; document.body.append(script); })), Promise.resolve());</script>" +
          `<body><script src="${url}"></script><script>started()</script></body>`
      );
      page.close();
    }
    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
