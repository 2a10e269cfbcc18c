// Typesets the mathematics of Markdown pages (.arithmatex) and notebook pages (.nb-math) with the site's own MathJax,
// on the first load and after every instant navigation. Pages without mathematics never load it.
(() => {
  const script = new URL("../mathjax/tex-mml-chtml.js", document.currentScript.src).href
  let loading = null

  window.MathJax = {
    tex: {
      inlineMath: [["\\(", "\\)"], ["$", "$"]],
      displayMath: [["\\[", "\\]"], ["$$", "$$"]],
      processEscapes: true,
      processEnvironments: true,
    },
    options: { enableMenu: false },
    chtml: { scale: 1.0, mtextInheritFont: true },
    startup: { typeset: false },
  }

  const load = () => {
    loading ??= new Promise((resolve, reject) => {
      const element = document.createElement("script")
      element.src = script
      element.onload = () => MathJax.startup.promise.then(resolve)
      element.onerror = () => reject(new Error(`cannot load ${script}`))
      document.head.appendChild(element)
    })
    return loading
  }

  const typeset = async () => {
    // Titles with mathematics appear again in header, navigation and footer, as plain text.
    const titles = [...document.querySelectorAll(".md-ellipsis")]
    const elements = [
      ...document.querySelectorAll(".arithmatex, .nb-math"),
      ...titles.filter((title) => /\\\(|\$[^$]+\$/.test(title.textContent)),
    ]
    if (elements.length === 0) return
    await load()
    MathJax.startup.output.clearCache()
    MathJax.typesetClear()
    MathJax.texReset()
    await MathJax.typesetPromise(elements)
    document.documentElement.dataset.mathematics = "ready"
  }

  let queue = Promise.resolve()
  document$.subscribe(() => {
    queue = queue.then(typeset).catch((error) => console.error(error))
  })
})()
