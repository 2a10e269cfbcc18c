// Filters for the table of systems: words, columns. The table is whole without them. What is chosen stands in the
// address of the page, so that a view can be shared.
(() => {
  const tool = document.getElementById("systems-tool")
  const table = document.getElementById("systems-table")
  if (!tool || !table || tool.childElementCount) return
  const heads = [...table.querySelectorAll("thead th[data-column]")]
  const rows = [...table.querySelectorAll("tbody tr")]
  const address = new URLSearchParams(location.search)
  const hidden = new Set((address.get("hide") ?? "").split(",").filter(Boolean))

  const label = (text, input) => {
    const element = document.createElement("label")
    element.append(input, text)
    return element
  }
  const words = document.createElement("input")
  words.type = "search"
  words.className = "md-input md-input--stretch"
  words.value = address.get("words") ?? ""
  words.setAttribute("aria-label", "Show systems with all of these words")
  words.placeholder = "Words, such as: uneven DeepEP"
  const count = document.createElement("p")
  count.setAttribute("role", "status")
  const boxes = document.createElement("fieldset")
  const legend = document.createElement("legend")
  legend.textContent = "Columns"
  boxes.append(legend)

  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean)
    let shown = 0
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase()
      row.hidden = !wanted.every((word) => text.includes(word))
      shown += row.hidden ? 0 : 1
    })
    table.querySelectorAll("[data-column]").forEach((cell) => { cell.hidden = hidden.has(cell.dataset.column) })
    count.textContent = `${shown} of ${rows.length} systems`
    const query = new URLSearchParams()
    if (words.value) query.set("words", words.value)
    if (hidden.size) query.set("hide", [...hidden].join(","))
    const search = query.toString()
    history.replaceState(history.state, "", location.pathname + (search ? `?${search}` : "") + location.hash)
  }
  heads.forEach((head) => {
    const box = document.createElement("input")
    box.type = "checkbox"
    box.checked = !hidden.has(head.dataset.column)
    box.addEventListener("change", () => {
      if (box.checked) hidden.delete(head.dataset.column)
      else hidden.add(head.dataset.column)
      show()
    })
    boxes.append(label(` ${head.textContent} `, box))
  })
  words.addEventListener("input", show)
  tool.append(words, boxes, count)
  show()
})()
