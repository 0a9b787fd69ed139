// What a node says of its run stands on the node itself: the host's front ends show `ui.text` on Preview Any alone. The
// text is a widget of the node, so the classic canvas and "Nodes 2.0" both draw it. It is not saved with a workflow: it
// comes with a run, also where the host answers from its cache.

import { app } from "/scripts/app.js"

const PREFIX = "Ref2V"
const NAME = "ref2v_text"
const LINE = 15 // pixels
const PADDING = 12
const MOST_LINES = 18 // more of them are scrolled to
const ROW = /^\||\S {2,}\S/ // of a table: its columns stay, while other lines are wrapped

const STYLE = {
  boxSizing: "border-box",
  width: "100%",
  height: "100%",
  minWidth: "0",
  margin: "0",
  padding: `${PADDING / 2}px 8px`,
  overflow: "auto",
  contain: "inline-size", // a long line is scrolled to and does not widen the node
  font: `11px/${LINE}px ui-monospace, Menlo, Consolas, "Noto Sans Mono CJK SC", monospace`,
  color: "var(--input-text, #ddd)",
  background: "var(--comfy-input-bg, #222)",
  borderRadius: "4px",
  userSelect: "text",
  cursor: "text",
}

// The widget is there from the start, hidden, since "Nodes 2.0" does not see all that come later.
function makeWidget(node) {
  const box = document.createElement("pre")
  Object.assign(box.style, STYLE)
  box.dataset.captureWheel = "true" // the wheel scrolls the text and not the canvas
  box.addEventListener("pointerdown", (event) => event.stopPropagation()) // text is marked, the node is not dragged
  let shown = ""
  const height = () => Math.min(box.children.length + 1, MOST_LINES) * LINE + PADDING // one more, for the scroll bar

  const widget = node.addDOMWidget(NAME, NAME, box, {
    serialize: false, // not in the prompt
    hideOnZoom: true,
    getMinHeight: () => (shown ? height() : 0),
    getValue: () => shown,
    setValue(text) {
      shown = text
      const lines = text.split("\n")
      box.replaceChildren(
        ...lines.map((line) => {
          const element = document.createElement("div")
          element.style.whiteSpace = ROW.test(line) ? "pre" : "pre-wrap"
          element.textContent = line || " "
          return element
        }),
      )
      widget.hidden = !shown
      box.style.display = shown ? "block" : "none"
      box.style.maxHeight = LiteGraph.vueNodesMode ? `${height()}px` : "" // on the canvas, the node's size decides
    },
  })
  widget.serialize = false // not in the workflow
  widget.value = ""
  return widget
}

function show(node, output) {
  if (!output?.text?.length) return
  const widget = node.widgets?.find((each) => each.name === NAME) ?? makeWidget(node)
  widget.value = [output.text].flat().join("\n\n")
  const least = node.computeSize()
  node.setSize([Math.max(node.size[0], least[0]), Math.max(node.size[1], least[1])])
  node.setDirtyCanvas?.(true, true)
}

app.registerExtension({
  name: "ref2v.text",

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith(PREFIX)) return
    const before = nodeType.prototype.onExecuted
    nodeType.prototype.onExecuted = function (output, ...more) {
      before?.call(this, output, ...more)
      show(this, output)
    }
  },

  nodeCreated(node) {
    if (node.comfyClass?.startsWith(PREFIX)) makeWidget(node)
  },

  // A front end keeps what came of a workflow's nodes while its tab is not in front, and puts it back a moment later.
  loadedGraphNode(node) {
    if (node.comfyClass?.startsWith(PREFIX)) setTimeout(() => node.graph && show(node, app.nodeOutputs?.[node.id]), 0)
  },
})
