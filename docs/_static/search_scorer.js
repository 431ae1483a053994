// Scores of search results: first pages and error messages first, changelogs and decisions last.
const FIRST = /^(install|quickstart|train_your_own|first_layer|your_own_experiment|troubleshooting)$/;
const LAST = /^(changelogs|convergence|release|security|architecture|decisions\/.*)$/;

var Scorer = {
  score: ([docname, , , , score, , kind]) => {
    if (LAST.test(docname)) return score - 20;
    if (FIRST.test(docname)) return score + 6;
    // Entries of the reference keep their score: only its pages as a whole rank below guides.
    return docname.startsWith("api/") && kind !== "object" ? score - 3 : score;
  },
  // The other values are the defaults of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
