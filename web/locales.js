// Front ends of late 2025 (1.32 to 1.34) merge the translations of custom nodes first and load the language after, which
// throws them away: everything but English is lost (Comfy-Org/ComfyUI_frontend#7214 mended it). This puts ours back, and
// does nothing where they are there.

import { api } from "/scripts/api.js"
import { app } from "/scripts/app.js"

const PREFIX = "Ref2V"
let translations = {}
let categories = {}

async function loadTranslations() {
  const language = app.ui.settings.getSettingValue("Comfy.Locale") ?? navigator.language.split("-")[0]
  if (language === "en") return {}
  const answer = await api.fetchApi("/i18n")
  return answer.ok ? ((await answer.json())[language] ?? {}) : {}
}

function translate(slot, name, field) {
  if (name && slot[field] !== name && (slot[field] ?? slot.name) === slot.name) slot[field] = name
}

app.registerExtension({
  name: "ref2v.locales",

  async addCustomNodeDefs(definitions) {
    try {
      const { nodeDefs, nodeCategories } = await loadTranslations()
      translations = nodeDefs ?? {}
      categories = nodeCategories ?? {}
    } catch (error) {
      console.warn("Ref2V: its translations could not be read", error)
    }
    for (const [id, words] of Object.entries(translations)) {
      const node = definitions[id]
      if (!node || !id.startsWith(PREFIX) || node.display_name === words.display_name) continue
      node.display_name = words.display_name
      node.description = words.description
      node.category = node.category.split("/").map((part) => categories[part] ?? part).join("/")
      for (const inputs of [node.input?.required, node.input?.optional])
        for (const [name, spec] of Object.entries(inputs ?? {}))
          if (spec[1] && words.inputs[name]) spec[1].tooltip = words.inputs[name].tooltip
      node.output_tooltips = node.output_tooltips?.map((english, i) => words.outputs[i]?.tooltip ?? english)
    }
  },

  nodeCreated(node) {
    const words = translations[node.comfyClass]
    if (!words || !node.comfyClass.startsWith(PREFIX)) return
    for (const slot of node.inputs ?? []) translate(slot, words.inputs[slot.name]?.name, "localized_name")
    for (const widget of node.widgets ?? []) translate(widget, words.inputs[widget.name]?.name, "label")
    node.outputs?.forEach((slot, i) => translate(slot, words.outputs[i]?.name, "localized_name"))
  },
})
