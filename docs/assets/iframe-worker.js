/* Browsers refuse Worker scripts of pages that were opened from a file. The search of the theme then runs in a hidden
   frame, which answers like a Worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.onerror = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const ready = new Promise((resolve) => {
        window.addEventListener("message", (event) => {
          if (event.source !== frame.contentWindow) return;
          if (event.data === "__ready__") return resolve();
          const copy = new MessageEvent("message", { data: event.data });
          this.dispatchEvent(copy);
          if (this.onmessage) this.onmessage(copy);
        });
      });
      // In a worker, `postMessage` answers the page and `importScripts` loads one script after the other.
      frame.srcdoc = `<script>
        const answer = (data) => parent.postMessage(data, "*");
        window.postMessage = answer;
        window.importScripts = (...urls) => urls.reduce((done, url) => done.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = url; script.onload = resolve; script.onerror = reject;
          document.body.appendChild(script);
        })), Promise.resolve());
        <\/script><body><script src="${url}" onload="answer('__ready__')"><\/script></body>`;
      document.body.appendChild(frame);
      this.post = (data) => ready.then(() => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    postMessage(data) { this.post(data); }
    terminate() {}
  };
}
