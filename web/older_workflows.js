// Workflow files hold the values of a node's widgets by position. Inputs now grow at the end only, but before that rule two
// nodes changed in between; files of that time are read as they were meant. The length tells which time a file is of.

import { app } from "/scripts/app.js"

const CONTROL = ["fixed", "increment", "decrement", "randomize"] // what a seed's "control after generate" is set to

const AS_MEANT = {
  // start_from and lora_rank came in before `more`
  Ref2VSetTrainingOptions: (values) => (values.length === 19 ? [...values.slice(0, 18), "", 0, values[18]] : values),
  // the seed lost its "control after generate"
  Ref2VBuildRefinerDataset: (values) =>
    values.length === 11 && CONTROL.includes(values[9]) ? values.filter((_, at) => at !== 9) : values,
  Ref2VSampleBase: (values) => (values.length === 7 && CONTROL.includes(values[6]) ? values.slice(0, 6) : values),
}

app.registerExtension({
  name: "ref2v.older_workflows",

  beforeRegisterNodeDef(nodeType, nodeData) {
    const asMeant = AS_MEANT[nodeData.name]
    if (!asMeant) return
    const configure = nodeType.prototype.configure
    nodeType.prototype.configure = function (saved, ...more) {
      const values = saved?.widgets_values
      if (!Array.isArray(values)) return configure.call(this, saved, ...more)
      return configure.call(this, { ...saved, widgets_values: asMeant(values) }, ...more)
    }
  },
})
