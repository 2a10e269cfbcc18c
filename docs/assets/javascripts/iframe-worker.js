// A browser starts no worker from a file. Read from disk, the site's search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.title = "search worker"
      document.body.appendChild(frame)
      const inside = frame.contentWindow
      inside.postToParent = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.post = (data) => inside.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise((resolve) => { inside.workerIsReady = resolve })
      inside.document.open()
      inside.document.write(`<!doctype html><body><script>
        self.postMessage = (data) => postToParent(data)
        self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          script.onerror = failed
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}" onload="workerIsReady()"><\/script>`)
      inside.document.close()
    }

    postMessage(data) {
      this.ready.then(() => this.post(data))
    }

    terminate() {}
  }
  window.Worker = window.IFrameWorker
}
