"""Prints the contract with the host: each symbol and member, how it is checked, and which files use it."""

import collections

import contract
import host_uses


def lines() -> list[str]:
    symbols, members = host_uses.symbols_used(), host_uses.members_used()
    found, counts = [], collections.Counter()
    for module, names in contract.SYMBOLS.items():
        for name, how in names.items():
            use = symbols.get(f"{module}.{name}", host_uses.Use())
            found.append(f"{how:9} {module}.{name}  <- {', '.join(sorted(use.where))}")
            counts[how] += 1
    for kind, names in contract.MEMBERS.items():
        for name, how in names.items():
            where = sorted(members.get(name, host_uses.Use()).where) or ["a name that the pack itself has too"]
            found.append(f"{how:9} {kind}: {name}  <- {', '.join(where)}")
            counts[how] += 1
    found += [f"behaviour {name}: {said}" for name, said in contract.BEHAVIOURS.items()]
    total = ", ".join(f"{count} {how}" for how, count in counts.most_common())
    return [*found, f"{sum(counts.values())} entries ({total}) and {len(contract.BEHAVIOURS)} behaviours"]


if __name__ == "__main__":
    print("\n".join(lines()))
