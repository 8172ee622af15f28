#include "bind.hpp"

namespace apportion {

Signature::Signature(const char* text) {
  std::string word;
  for (; *text != '\0'; ++text) {
    if (*text == ' ') continue;
    if (*text != '(' && *text != ',' && *text != ')')
      word += *text;
    else if (name.empty())
      name = std::exchange(word, {});
    else
      arguments.push_back(std::exchange(word, {}));
  }
}

NB_MODULE(_core, core) {
  core.attr("checked") = CHECKED;
  for (const Area& area : Area::all()) {
    nb::module_ m = core.def_submodule(area.name);
    area.bind(m);
  }
}

}  // namespace apportion
