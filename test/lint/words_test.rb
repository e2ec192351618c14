# frozen_string_literal: true

require "minitest/autorun"

# Words of a private vocabulary that gave way to the field's standard terms, which stand beside them. They do not come back.
class WordsTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)

  GONE = {
    "council" => "coordinator", "seat" => "participant", "comer" => "joiner", "lament" => "warning", "tale" => "report", "reign" => "term"
  }.freeze

  FILES = "{src,include,ext,lib,bin,examples,test,docs}/**/*.{c,cc,h,rb,py,md}"

  # Words that are plain English elsewhere: gone from the code and the comments of these files, but not from their texts.
  GONE_IN = {
    "{src/backend,test/c/{shm,gloo,nccl,backend,hosts}}/**/*.{c,cc,h}" => {
      "alike" => "equal", "apart" => "not contiguous", "bear" => "support", "bell" => "doorbell", "comparer" => "call checker",
      "course" => "cursor", "desk" => "exchange", "farewell" => "failure report or close notice", "giver" => "sender",
      "handover" => "segment exchange", "lend" => "lease", "letter" => "message header", "mail" => "point-to-point region",
      "parcel" => "eager buffer", "patience" => "timeout", "placing" => "location", "quest" => "specification", "spoilt" => "poisoned",
      "taker" => "receiver", "unfit" => "invalid", "verdict" => "check", "wish" => "preference"
    },
    "src/backend/**/*.{c,cc,h}" => {
      "carrier" => "leader", "everybody" => "all ranks", "lane" => "pair of ranks", "somebody" => "another thread", "whoever" => "the thread that"
    },
    "{src/{base,net,store},test/c/{base,net,store}}/**/*.{c,h}" => {
      "dial" => "connect", "everybody" => "all clients", "farewell" => "departure", "goodbye" => "departure", "heard" => "received",
      "lets go" => "releases", "patience" => "timeout", "patient" => "with a timeout", "somebody" => "a client, a caller",
      "speak" => "use a protocol", "told" => "notified, logged", "whoever" => "the client that, the thread that"
    },
    "{lib,bin}/**/*.rb" => {
      "everybody" => "all ranks", "farewell" => "leaving", "heard" => "received", "let go" => "release", "patience" => "timeout",
      "somebody" => "a rank, another process", "speak" => "use", "told" => "reported, logged", "verdict" => "outcome",
      "whoever" => "the rank that, the process that"
    },
    "src/backend/shm/*.{c,h}" => {"offer" => "rendezvous", "turn" => "epoch", "visit" => "connection"},
    "{src,test/c}/group/**/*.{c,h}" => {
      "account" => "status report", "alarm" => "failure notice", "alike" => "of one dtype and device", "anybody" => "a thread",
      "attend" => "process", "blame" => "root cause", "conclude" => "complete", "deaf" => "store lost", "everybody" => "all ranks",
      "hear" => "receive", "judge" => "record the outcome", "places" => "layout", "post mortem" => "root cause", "post_mortem" => "root cause",
      "settled" => "complete", "sight" => "liveness", "somebody" => "another thread", "spare" => "idle", "undecided" => "incomplete",
      "verdict" => "root cause", "vigil" => "watcher thread", "watch" => "failure detector"
    },
    "{src/{reducer,hooks,flat,torch},test/c/{reducer,hooks,flat,torch}}/**/*.{c,cc,h}" => {
      "alike" => "equal", "arrival" => "ready gradient", "complaint" => "error", "everybody" => "all ranks", "gone" => "destroyed",
      "lend" => "contribute", "midst" => "during", "nobody" => "no rank", "patience" => "deadline", "settle" => "wait, finalize or validate",
      "somebody" => "another thread", "spoilt" => "poisoned", "tell" => "report", "teller" => "recording hook", "told" => "reported",
      "usage" => "unused parameters", "whoever" => "the thread that", "whole" => "full or contiguous"
    },
    "ext/torch_ddp/*.{c,cc,h}" => {
      "aside" => "helper thread", "gone" => "released", "lend" => "borrow", "midst" => "within", "patience" => "timeout",
      "settle" => "raise the outcome", "somebody" => "another thread", "tell" => "report", "told" => "reported", "whoever" => "the caller"
    }
  }.freeze

  # Where a word is the field's own: a vector's lanes.
  KEPT = {"lane" => %r{\Asrc/backend/arith/}}.freeze

  STRINGS = /"(?:\\.|[^"\\])*"/

  def test_words_that_are_gone
    files = Dir[File.join(ROOT, FILES)] + Dir[File.join(ROOT, "*.md")] - [File.expand_path(__FILE__)]
    assert_empty files.sort.flat_map { |file| file.start_with?(File.join(ROOT, "lib/torch_ddp/native")) ? [] : found_in(file, GONE) }
  end

  def test_words_that_are_gone_from_a_room
    assert_empty(GONE_IN.flat_map { |files, gone| Dir[File.join(ROOT, files)].sort.flat_map { |file| found_in(file, gone, texts: false) } })
  end

  private

  def found_in(file, gone, texts: true)
    name = file.delete_prefix("#{ROOT}/")
    pattern = /(?<![a-z])(#{gone.keys.join("|")})s?(?![a-z])/i
    File.readlines(file).each.with_index(1).filter_map do |line, number|
      word = (texts ? line : line.gsub(STRINGS, ""))[pattern, 1]&.downcase or next
      next if name.match?(KEPT.fetch(word, /\A\z/))

      "#{name}:#{number}: #{word}; the field says #{gone.fetch(word)}"
    end
  end
end
