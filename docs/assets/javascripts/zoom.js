// Shows a figure large on a click. GLightbox comes from the site itself, on the first click; without it, or with a
// modifier key, the link just opens the image.
(() => {
  const base = new URL("../glightbox/", document.currentScript.src)
  let loading = null

  const add = (tag, attributes) => new Promise((resolve, reject) => {
    const element = Object.assign(document.createElement(tag), attributes)
    element.onload = resolve
    element.onerror = () => reject(new Error(`cannot load ${element.src || element.href}`))
    document.head.appendChild(element)
  })

  const load = () => {
    loading ??= Promise.all([
      add("link", { rel: "stylesheet", href: new URL("glightbox.min.css", base).href }),
      add("script", { src: new URL("glightbox.min.js", base).href }),
    ])
    return loading
  }

  const open = async (link) => {
    await load()
    const links = [...document.querySelectorAll("a.guide-zoom")].filter((other) => other.checkVisibility())
    const elements = links.map((other) => ({
      href: other.href,
      type: "image",
      alt: other.querySelector("img").alt,
      description: other.closest("figure").querySelector("figcaption")?.innerHTML ?? "",
    }))
    const box = GLightbox({ elements, openEffect: "none", closeEffect: "none", slideEffect: "none", loop: false })
    box.on("close", () => link.focus())
    box.openAt(links.indexOf(link))
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a.guide-zoom")
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return
    event.preventDefault()
    open(link).catch(() => { location.href = link.href })
  })
})()
