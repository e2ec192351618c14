/*
 * -m NAME. Ruby has no such flag, so a few lines of Ruby stand for it. NAME is looked for, in this
 * order, as a program of a gem of the bundle, as a library on the load path, in a gem of that
 * name, and in ./lib and the current folder. The file becomes $0, so that `if $0 == __FILE__`
 * holds. "A::B" is "a/b". Pure: no thread, no global.
 */
#include <ctype.h>
#include <stddef.h>

#include "launch/command/module.h"

bool tddp_launch_module_is_python(const char *name)
{
    int dots = 0;
    bool begins = true;
    for (const char *at = name; *at != '\0'; at++) {
        unsigned char character = (unsigned char)*at;
        if (character == '.') {
            if (begins) {
                return false;
            }
            dots++;
            begins = true;
        } else if (isalpha(character) || character == '_' || (isdigit(character) && !begins)) {
            begins = false;
        } else {
            return false;
        }
    }
    return dots > 0 && !begins;
}

/* Names of the code's own would be the program's top-level variables: a block keeps them in. */
const char tddp_launch_module_code[] =
    "proc do |asked|\n"
    "  name = asked.split('::').map { |part| asked.include?('::') ?\n"
    "    part.gsub(/([a-z0-9])([A-Z])/, '\\\\1_\\\\2').downcase : part }.join('/')\n"
    "  on_path = -> { $LOAD_PATH.resolve_feature_path(name)&.last }\n"
    "  gem = Gem::Specification.find { |found| found.executables.include?(name) }\n"
    "  gem.activate if gem && !gem.activated?\n"
    "  path = gem ? gem.bin_file(name) : on_path.call\n"
    "  path ||= on_path.call if Gem.try_activate(name)\n"
    "  unless path\n"
    "    folder = %w[lib .].map { |each| File.expand_path(each) }\n"
    "      .find { |each| File.file?(File.join(each, name + '.rb')) }\n"
    "    abort \"torchrun: -m #{asked}: no gem has such a program, and the load path, ./lib and \" "
    "+\n"
    "      \"the current folder have no #{name}.rb\" +\n"
    "      (File.file?(name + '.py') ? \"; for #{name}.py: torchrun #{name}.py\" : '') unless "
    "folder\n"
    "    $LOAD_PATH.unshift(folder)\n"
    "    path = File.join(folder, name + '.rb')\n"
    "  end\n"
    "  abort \"torchrun: -m #{asked}: #{path} is not written in Ruby\" if path.end_with?('.so')\n"
    "  $0 = path\n"
    "  path\n"
    "end.call(ARGV.shift).then { |path| load(path) }\n";
