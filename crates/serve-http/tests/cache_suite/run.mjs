// Runs tests of the suite against a cache, and prints a line of JSON for each: its suite, name, kind,
// result and message. The arguments are the cache's address and the names of tests, by default all.

import { getResults, runTests } from './test-engine/client/runner.mjs'
import { determineTestResult, resultTypes } from './test-engine/lib/results.mjs'
import suites from './tests/index.mjs'

const [base, ...names] = process.argv.slice(2)
const isWanted = test => names.length === 0 || names.includes(test.id)
const chosen = suites.map(suite => ({ ...suite, tests: suite.tests.filter(isWanted) }))
// The suite notes connections that fail, which some tests are about.
console.error = () => {}
await runTests(chosen, false, base)
const results = getResults()
const nameOf = new Map(Object.entries(resultTypes).map(([name, type]) => [type, name]))
for (const suite of chosen) {
  for (const test of suite.tests.filter(test => test.id in results)) {
    const result = nameOf.get(determineTestResult(suites, test.id, results, names.length === 0))
    const message = results[test.id] === true ? '' : results[test.id].join(': ')
    console.log(JSON.stringify({ suite: suite.id, id: test.id, kind: test.kind ?? 'required', result, message }))
  }
}
process.exit(0)
