// Browsers start no worker for a page of the file system. The search of the site then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.reply = (data) => this.answer(data);
      this.ready = new Promise((done) => (this.inside.ready = done));
      const page = this.inside.document;
      page.open();
      page.write(
        "<script>postMessage = self.postMessage = (data) => reply(data)</script>" +
          `<script src="${url}"></script><script>ready()</script>`,
      );
      page.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    terminate() {}
  };
}
